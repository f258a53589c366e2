"""The backend that asks a search service: one request per query, many at once, answers kept."""

import importlib.util
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from typing import Any, TypeVar

from search_r1.online.addresses import AddressPolicy
from search_r1.online.fetch import Deadline, PageError, PageFetcher
from search_r1.online.pages import READERS, cut
from search_r1.online.services import SERVICES, SearchRequest, SearchResult
from search_r1.online.upstream import Upstream, read_credentials
from search_r1.search.backends.base import Retriever, fingerprint, stage
from search_r1.search.errors import SetupError, install_command
from search_r1.search.schema import Document, Hit
from search_r1.search.server.batching import open_store
from search_r1.search.settings import OnlineConfig, RetrieverConfig
from search_r1.storage import MemoryStore, Storage
from verl.errors import redact

logger = logging.getLogger(__name__)

T = TypeVar("T")
MOST_KEPT = 100_000
"""Characters of a page; beyond them only what is asked for."""
NUM_RECENT_ANSWERS = 4096
NUM_RECENT_PAGES = 512
NUM_REQUESTS = 16
"""Requests to the service that are under way at once."""
NUM_FETCHES = 64
"""Pages likewise: a few slow ones must not hold up the others."""


class OnlineRetriever:
    """Results of a service as documents: the id is the page's address, the text its snippet."""

    num_threads = 8
    num_documents = 0

    def __init__(
        self, upstream: Upstream, config: OnlineConfig, policy: AddressPolicy, answers: Storage,
        texts: Storage,
    ) -> None:  # fmt: skip
        """`answers` keeps the service's, `texts` those of pages that `policy` lets fetch."""
        self.name = upstream.service.name
        self._upstream = upstream
        self._config = config
        self._answers, self._texts = answers, texts
        self._pages = PageFetcher(policy, config.page_bytes) if config.page_text else None
        self._page_scope = fingerprint({"page_bytes": config.page_bytes})
        self._scope = fingerprint(self._service_facts())
        self._requests = ThreadPoolExecutor(NUM_REQUESTS, thread_name_prefix="online")
        self._fetches = ThreadPoolExecutor(NUM_FETCHES, thread_name_prefix="pages")

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """At most `k` results per query, best first; raises an Upstream error."""
        distinct = list(dict.fromkeys(queries))
        with stage("search"):
            results = _all(self._requests, lambda query: self._find(query, k), distinct)
        found = dict(zip(distinct, results, strict=True))
        texts = self._page_texts(result.url for of_query in results for result in of_query)
        return [_hits(found[query], texts) for query in queries]

    def info(self) -> dict[str, Any]:
        """The service, its address, and how pages are read; never a key."""
        facts: dict[str, Any] = {**self._service_facts(), "page_text": self._pages is not None}
        if self._pages is not None:
            facts |= {"page_bytes": self._config.page_bytes, "page_chars": self._config.page_chars}
        return facts

    def close(self) -> None:
        """Wait for what is under way and let go of connections and files."""
        self._requests.shutdown(cancel_futures=True)
        self._fetches.shutdown(cancel_futures=True)
        for part in (self._upstream, self._pages, self._answers):
            if part is not None:
                part.close()

    def _service_facts(self) -> dict[str, Any]:
        """What decides the service's answers; a setting, such as Google's engine id, as a hash."""
        facts = {"engine": self.name, "url": redact(self._upstream.url)}
        setting = self._upstream.setting
        return {**facts, "setting": fingerprint({"setting": setting})} if setting else facts

    def _find(self, query: str, k: int) -> list[SearchResult]:
        """The results of one query, from the cache where they are kept."""
        asked = self._upstream.service.shorten(query)
        if not asked:
            return []
        key = ("answer", self._scope, asked, k)
        kept = self._answers.get([key])
        if key in kept:
            return [SearchResult(*fields) for fields in kept[key]]
        found = self._ask_pages(asked, k)
        self._answers.put({key: [astuple(result) for result in found]})
        return found

    def _ask_pages(self, query: str, k: int) -> list[SearchResult]:
        """`k` results over as many pages of the service as they fill; an empty page is the last."""
        service = self._upstream.service
        wanted = min(k, service.most)
        size = min(wanted, service.most_per_request)
        found: dict[str, SearchResult] = {}
        for page in range(math.ceil(wanted / size)):
            results = self._upstream.ask(SearchRequest(query, size, page))
            for result in results:
                found.setdefault(result.url, result)
            if not results or len(found) >= wanted:
                break
        return list(found.values())[:wanted]

    def _page_texts(self, urls: Iterable[str]) -> dict[str, str]:
        """The texts of the pages that could be read, by address; none without --page_text."""
        if self._pages is None:
            return {}
        distinct = list(dict.fromkeys(urls))
        pages, deadline = self._pages, Deadline(self._config.online_timeout)
        with stage("fetch"):
            texts = _all(self._fetches, lambda url: self._text(pages, url, deadline), distinct)
        return {url: text for url, text in zip(distinct, texts, strict=True) if text is not None}

    def _text(self, pages: PageFetcher, url: str, deadline: Deadline) -> str | None:
        """The first characters of the page's text, cut at a word; None if it cannot be read."""
        key, most = ("page", self._page_scope, url), self._config.page_chars
        text = self._texts.get([key]).get(key)
        if text is None:
            try:
                whole = READERS.read(pages.fetch(url, deadline), deadline).text
            except PageError as error:
                logger.info("no text of page %r: %s", url, error)
                return None
            text = cut(whole, max(MOST_KEPT, most))
            self._texts.put({key: text})
        return cut(text, most)


def open_retriever(config: RetrieverConfig) -> Retriever:
    """The service that the settings name, with the key that the environment holds."""
    return open_online(config.retriever_name, config.online, AddressPolicy())


def open_online(name: str, config: OnlineConfig, policy: AddressPolicy) -> OnlineRetriever:
    """The service `name`; pages are fetched from where `policy` allows. Raises SetupError."""
    service = SERVICES[name]
    upstream = Upstream(service, read_credentials(service), config)
    answers: Storage = MemoryStore(NUM_RECENT_ANSWERS)  # spares paying twice for a failed batch
    texts: Storage = MemoryStore(NUM_RECENT_PAGES)
    if config.online_cache is not None:
        answers = texts = open_store(config.online_cache, "--online_cache")
    if config.page_text and importlib.util.find_spec("trafilatura") is None:
        command = install_command("online")
        raise SetupError(f"--page_text needs trafilatura; install it: {command}")
    return OnlineRetriever(upstream, config, policy, answers, texts)


def _all(pool: ThreadPoolExecutor, work: Callable[[str], T], items: Sequence[str]) -> list[T]:
    """`work` on every item at once, in order; a failure calls off what has not begun."""
    futures = [pool.submit(work, item) for item in items]
    try:
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()


def _hits(found: Sequence[SearchResult], texts: dict[str, str]) -> list[Hit]:
    """Results with the service's scores, or, where one has none, with 1, 1/2, 1/3 ... by rank."""
    has_scores = all(result.score is not None for result in found)
    scores = [(f.score or 0.0) if has_scores else 1 / rank for rank, f in enumerate(found, 1)]
    documents = [Document.from_title(f.url, f.title, texts.get(f.url, f.snippet)) for f in found]
    hits = [Hit(document, score) for document, score in zip(documents, scores, strict=True)]
    return sorted(hits, key=lambda hit: -hit.score)
