"""Whether a retriever answers: asked before a run begins, and before it goes on after failures."""

import asyncio
import logging
from collections.abc import Sequence

import httpx

from search_r1.search.client import RetrievalClient
from search_r1.search.errors import RetrieverRefused, RetrieverUnavailable

QUERY = "capital of France"


class SearchProbe:
    """Searches for something: `/health` may answer where searches fail."""

    def __init__(self, url: str | Sequence[str], topk: int | None, timeout: float) -> None:
        """`url` and `topk` as of the client; one attempt takes at most `timeout` seconds."""
        self._url = url
        self._topk = topk
        self._timeout = timeout

    def __call__(self, seconds: float) -> str:
        """What is wrong, or an empty text where a server answers; takes at most `seconds`.

        A refusal is an answer: that of one query, as of a replay, or one that waiting cannot help.
        """
        try:
            asyncio.run(self._search(seconds))
        except RetrieverRefused:
            return ""
        except RetrieverUnavailable as error:
            return error.reason
        return ""

    async def _search(self, seconds: float) -> None:
        """One search; a second attempt and a third, so that a single error is no outage."""
        async with RetrievalClient(
            self._url, self._topk, timeout=self._timeout, max_retries=2, deadline=seconds,
            log_level=logging.DEBUG,
        ) as client:  # fmt: skip
            await client.search(QUERY)


def retriever_problem(url: str, timeout: float) -> str:
    """What is wrong with a search server, or an empty text; `timeout` in seconds.

    `/health` beside the given path is asked first. A server that has none gets one query.
    """
    try:
        with httpx.Client(timeout=timeout, trust_env=False) as client:
            health = client.get(httpx.URL(url).join("health"))
            if health.is_success:
                return ""
            if health.status_code not in (404, 405, 501):
                return f"{health.status_code} from /health: {health.text[:80]!r}"
            query = {"queries": [QUERY], "topk": 1, "return_scores": False}
            answer = client.post(url, json=query)
            if not answer.is_success:
                return f"{answer.status_code}: {answer.text[:80]!r}"
            body = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return f"no answer ({_first_line(error)})"
    except ValueError:
        return "an answer that is not JSON"
    result = body.get("result") if isinstance(body, dict) else None
    sound = isinstance(result, list) and len(result) == 1
    return "" if sound else f"{str(body)[:80]!r}"


def _first_line(error: Exception) -> str:
    """The first line of an error, with its kind."""
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
