"""What a page says about a query, in the words of a chat model.

A long page answers a query somewhere; its first characters rarely do. So the model reads more of
it than a policy could, once for each query, as R1-Searcher does with pages of the web
(arXiv 2503.05592).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from search_r1.chat import ChatEndpoint, ChatRefused
from search_r1.online.services import truncate
from search_r1.online.upstream import check_url, keep_secret, redact
from search_r1.retrieval.errors import SetupError, UpstreamRefused, UpstreamUnavailable
from search_r1.retrieval.settings import OnlineConfig
from search_r1.retrying import Backoff, TransientError, call_with_retries
from verl.errors import explain
from verl.errors import redact as without_password

KEY = "PAGE_SUMMARY_API_KEY"
"""Environment variable with the key, if the server wants one."""
MAX_PAGE_CHARS = 24_000
"""Number of a page's first characters that the model reads."""
NOTHING = "NONE"
"""The model's reply if a page does not help; the document then keeps its snippet."""
BACKOFF = Backoff(0.5, 30.0, 30.0)
WORDING = """Here is the text of a web page. Report what it says that helps to answer the query, \
with names, dates and numbers as they stand there and nothing from elsewhere, in at most {words} \
words. If nothing on it helps, reply {nothing}.

Query: {query}

Page: {page}"""


@dataclass(frozen=True)
class SummaryModel:
    """The chat model that reads pages, as `search_r1.chat` wants it."""

    url: str
    model: str
    api_key: str | None = field(repr=False)
    timeout: float
    max_tokens: int = 512
    max_concurrency: int = 16
    body: Mapping[str, Any] = field(default_factory=dict)


class Summarizer:
    """Summaries of pages for queries; usable from any thread."""

    def __init__(self, options: SummaryModel, retries: int, max_chars: int) -> None:
        """A summary has at most `max_chars` characters."""
        self._retries, self._max_chars = retries, max_chars
        self._chat = ChatEndpoint(options, "page summary")
        self.facts = {
            "page_summary": options.model,
            "page_summary_url": without_password(options.url),
        }

    def summarize(self, query: str, page: str) -> str:
        """Return what the page says about the query; empty if that is nothing.

        Raises UpstreamUnavailable after all retries, UpstreamRefused if the server refuses.
        """
        words = max(self._max_chars // 8, 10)
        message = WORDING.format(words=words, nothing=NOTHING, query=query, page=page)
        try:
            reply = call_with_retries(lambda: self._chat.ask(message), self._retries, BACKOFF)
        except TransientError as error:
            raise UpstreamUnavailable(f"no summary of a page: {redact(str(error))}") from error
        except ChatRefused as error:
            hint = f"check --page_summary_model, --page_summary_url and {KEY}"
            raise UpstreamRefused(f"no summary of a page: {redact(str(error))}; {hint}") from error
        text = " ".join(reply.text.split())
        return "" if text.strip(".").upper() == NOTHING else truncate(text, self._max_chars)


def open_summarizer(config: OnlineConfig) -> Summarizer | None:
    """Return the model that the settings name, if they name one. Raises SetupError."""
    given = config.page_summary_url, config.page_summary_model
    if given == (None, None):
        return None
    url, model = given
    if url is None or model is None or not config.page_text:
        got = f"url {url}, model {model}, page_text {config.page_text}"
        fix = "--page_text --page_summary_url http://HOST/v1 --page_summary_model NAME"
        raise SetupError(explain("--page_summary_url", got, "all three, or none", fix))
    if key := os.environ.get(KEY, "").strip() or None:
        keep_secret(key)
    options = SummaryModel(check_url(url, "--page_summary_url"), model, key, config.online_timeout)
    return Summarizer(options, config.online_retries, config.page_chars)
