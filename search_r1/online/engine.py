"""The backend of online search services: concurrent requests, one per query, cached answers."""

import importlib.util
import logging
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from typing import Any

from cachetools import LRUCache

from search_r1.online.addresses import AddressPolicy
from search_r1.online.fetch import Deadline, PageError, PageFetcher
from search_r1.online.pages import EXTRACTORS
from search_r1.online.services import SERVICES, SearchRequest, SearchResult, truncate
from search_r1.online.summary import MAX_PAGE_CHARS, Summarizer, open_summarizer
from search_r1.online.upstream import Upstream, read_credentials
from search_r1.retrieval.engines.base import Retriever, stage
from search_r1.retrieval.errors import SetupError, install_command
from search_r1.retrieval.schema import Document, Hit, fingerprint
from search_r1.retrieval.settings import OnlineConfig, RetrieverConfig
from search_r1.store import FileStore, Key
from verl.errors import explain, redact

logger = logging.getLogger(__name__)

MAX_CACHED_CHARS = 100_000
"""Maximum number of characters of a page's text in the cache, unless more are requested."""
NUM_RECENT_ANSWERS = 4096
NUM_RECENT_PAGES = 512
NUM_REQUESTS = 16
"""Maximum number of concurrent requests to the service."""
NUM_FETCHES = 64
"""Maximum number of concurrent page fetches; large, since slow pages must not delay others."""


class MemoryStore:
    """LRU cache of at most `max_entries` values; thread-safe."""

    def __init__(self, max_entries: int) -> None:
        self._values: LRUCache[Key, Any] = LRUCache(max_entries)
        self._lock = threading.Lock()

    def get(self, keys: Sequence[Key]) -> dict[Key, Any]:
        """Return the values of those keys that are present, and mark them as recently used."""
        with self._lock:
            return {key: self._values[key] for key in keys if key in self._values}

    def put(self, values: Mapping[Key, Any]) -> None:
        """Add values, and evict the least recently used ones."""
        with self._lock:
            self._values.update(values)

    def close(self) -> None:
        """Forget all values."""
        with self._lock:
            self._values.clear()


Storage = MemoryStore | FileStore


class OnlineRetriever:
    """Results of a service as documents: the id is the page's URL, the text its snippet."""

    num_threads = 8
    num_documents = 0

    def __init__(
        self, upstream: Upstream, config: OnlineConfig, policy: AddressPolicy, answers: Storage,
        texts: Storage, summarizer: Summarizer | None,
    ) -> None:  # fmt: skip
        """`answers` and `texts` are caches; `policy` restricts where pages are fetched from."""
        self.name = upstream.service.name
        self._upstream = upstream
        self._config = config
        self._answers, self._texts = answers, texts
        self._pages = PageFetcher(policy, config.page_bytes) if config.page_text else None
        self._summarizer = summarizer
        self._max_cached_chars = max(MAX_CACHED_CHARS, config.page_chars)
        facts: dict[str, Any] = {"page_bytes": config.page_bytes}
        if config.page_chars > MAX_CACHED_CHARS:  # other settings may have cached shorter texts
            facts["page_chars"] = config.page_chars
        self._page_scope = fingerprint(facts)
        self._scope = fingerprint(self._service_facts())
        self._summary_scope = ""
        if summarizer is not None:
            facts = {"page": self._page_scope, "chars": config.page_chars, **summarizer.facts}
            self._summary_scope = fingerprint(facts)
        self._requests = ThreadPoolExecutor(NUM_REQUESTS, thread_name_prefix="online")
        self._fetches = ThreadPoolExecutor(NUM_FETCHES, thread_name_prefix="pages")

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Return at most `k` results per query, best first; raises an Upstream error."""
        distinct = list(dict.fromkeys(queries))
        with stage("search"):
            results = list(self._requests.map(lambda query: self._find(query, k), distinct))
        results_of = dict(zip(distinct, results, strict=True))
        texts = self._page_texts(result.url for found in results for result in found)
        texts_of = self._texts_for(results_of, texts)
        return [_hits(results_of[query], texts_of[query]) for query in queries]

    def info(self) -> dict[str, Any]:
        """Return the service, its URL, and how pages are read; never a key."""
        facts: dict[str, Any] = {**self._service_facts(), "page_text": self._pages is not None}
        if self._pages is not None:
            facts |= {"page_bytes": self._config.page_bytes, "page_chars": self._config.page_chars}
        return facts | (self._summarizer.facts if self._summarizer else {})

    def close(self) -> None:
        """Wait for running requests and close connections and files."""
        self._requests.shutdown(cancel_futures=True)
        self._fetches.shutdown(cancel_futures=True)
        for resource in (self._upstream, self._pages, self._answers):
            if resource is not None:
                resource.close()

    def _service_facts(self) -> dict[str, Any]:
        """Return facts that affect answers; a setting, such as Google's engine id, is hashed."""
        facts: dict[str, Any] = {"engine": self.name, "url": redact(self._upstream.url)}
        if setting := self._upstream.setting:
            facts["setting"] = fingerprint({"setting": setting})
        if self._config.answer_boxes:
            facts["answer_boxes"] = True
        return facts

    def _find(self, query: str, k: int) -> list[SearchResult]:
        """Return the results of one query, from the cache if possible."""
        text = self._upstream.service.shorten(query)
        if not text:
            return []
        key = ("answer", self._scope, text, k)
        cached = self._answers.get([key])
        if key in cached:
            return [SearchResult(*fields) for fields in cached[key]]
        results = self._request_pages(text, k)
        self._answers.put({key: [astuple(result) for result in results]})
        return results

    def _request_pages(self, query: str, k: int) -> list[SearchResult]:
        """Request result pages until there are `k` different results or a page is empty."""
        service = self._upstream.service
        max_results = min(k, service.max_results)
        page_size = min(max_results, service.max_per_request)
        results: dict[str, SearchResult] = {}
        for page in range(math.ceil(max_results / page_size)):
            with_box = self._config.answer_boxes and page == 0
            new_results = self._upstream.search(SearchRequest(query, page_size, page, with_box))
            for result in new_results:
                results.setdefault(result.url, result)
            if not new_results or len(results) >= max_results:
                break
        return list(results.values())[:max_results]

    def _page_texts(self, urls: Iterable[str]) -> dict[str, str]:
        """Return the texts of all pages that can be read, by URL; none without --page_text."""
        if self._pages is None:
            return {}
        distinct = [url for url in dict.fromkeys(urls) if url.startswith("http")]  # no boxes
        pages, deadline = self._pages, Deadline(self._config.online_timeout)
        with stage("fetch"):
            texts = self._fetches.map(lambda url: self._page_text(pages, url, deadline), distinct)
            return {
                url: text for url, text in zip(distinct, texts, strict=True) if text is not None
            }

    def _page_text(self, pages: PageFetcher, url: str, deadline: Deadline) -> str | None:
        """Return the first characters of the page's text, or None if it cannot be read."""
        key = ("page", self._page_scope, url)
        text = self._texts.get([key]).get(key)
        if text is None:
            try:
                full_text = EXTRACTORS.extract(pages.fetch(url, deadline), deadline).text
            except PageError as error:
                logger.info("no text of page %r: %s", url, error)
                return None
            text = truncate(full_text, self._max_cached_chars)
            self._texts.put({key: text})
        return truncate(text, MAX_PAGE_CHARS if self._summarizer else self._config.page_chars)

    def _texts_for(
        self, results_of: Mapping[str, Sequence[SearchResult]], texts: Mapping[str, str]
    ) -> dict[str, Mapping[str, str]]:
        """Return the texts by URL for each query: the pages', or what they say about the query."""
        if (summarizer := self._summarizer) is None:
            return dict.fromkeys(results_of, texts)
        pairs = [
            (query, found.url) for query, results in results_of.items() for found in results
            if found.url in texts
        ]  # fmt: skip
        with stage("summarize"):
            summaries = self._requests.map(
                lambda pair: self._summary(summarizer, pair[0], pair[1], texts[pair[1]]), pairs
            )
            texts_of: dict[str, dict[str, str]] = {query: {} for query in results_of}
            for (query, url), summary in zip(pairs, summaries, strict=True):
                if summary:
                    texts_of[query][url] = summary
        return dict(texts_of)

    def _summary(self, summarizer: Summarizer, query: str, url: str, page: str) -> str:
        """Return what a page says about a query, from the cache if possible."""
        key = ("summary", self._summary_scope, query, url)
        summary = self._texts.get([key]).get(key)
        if summary is None:
            summary = summarizer.summarize(query, page)
            self._texts.put({key: summary})
        return str(summary)


def open_retriever(config: RetrieverConfig) -> Retriever:
    """Open the configured service, with the key from the environment."""
    return open_online(config.retriever_name, config.online, AddressPolicy())


def open_online(name: str, config: OnlineConfig, policy: AddressPolicy) -> OnlineRetriever:
    """Open service `name`; pages are fetched as `policy` allows. Raises SetupError."""
    if config.page_text and importlib.util.find_spec("trafilatura") is None:
        raise SetupError(f"--page_text needs trafilatura; install it: {install_command('online')}")
    service = SERVICES[name]
    if config.answer_boxes and service.read_box is None:
        with_boxes = ", ".join(other.name for other in SERVICES.values() if other.read_box)
        raise SetupError(explain("--answer_boxes", name, with_boxes, "leave --answer_boxes out"))
    summarizer = open_summarizer(config)
    upstream = Upstream(service, read_credentials(service), config)
    answers: Storage = MemoryStore(NUM_RECENT_ANSWERS)  # a failed batch is not paid for twice
    texts: Storage = MemoryStore(NUM_RECENT_PAGES)
    if config.online_cache is not None:
        answers = texts = FileStore(config.online_cache, "--online_cache")
    return OnlineRetriever(upstream, config, policy, answers, texts, summarizer)


def _hits(results: Sequence[SearchResult], texts: Mapping[str, str]) -> list[Hit]:
    """Return hits, best first; scores are 1, 1/2, 1/3 ... by rank if the service has none."""
    has_scores = all(result.score is not None for result in results)
    hits = []
    for rank, result in enumerate(results, 1):
        text = texts.get(result.url, result.snippet)
        score = (result.score or 0.0) if has_scores else 1 / rank
        hits.append(Hit(Document.from_title(result.url, result.title, text), score))
    return sorted(hits, key=lambda hit: -hit.score)
