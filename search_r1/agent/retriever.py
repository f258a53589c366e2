"""Tools over a retrieval server: its client, probes, preflight checks and fingerprints."""

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from search_r1 import loops
from search_r1.agent.search import SearchTool, count_blank
from search_r1.retrieval.client import RetrievalClient, read_urls
from search_r1.retrieval.errors import RetrieverRefused, RetrieverUnavailable, SearchError
from search_r1.retrieval.protocol import EmptyRetrieval
from search_r1.retrieval.schema import fingerprint
from verl import plugins
from verl.agent.interface import Tool
from verl.config import Config
from verl.config.agent import EMPTY_URL, ServerConfig
from verl.errors import ConfigError, ToolError, ToolRefused, explain

logger = logging.getLogger(__name__)

TEST_QUERY = "capital of France"
"""Query that probes search for."""
PROBE_TIMEOUT_S = 30.0
"""Maximum seconds for one attempt of a probe, or for a request for fingerprints."""
FIX = "start it (bash retrieval_launch.sh)"
UNRECORDED_QUERY, REPLAY = 424, "replay"
"""Status with which the replay backend refuses a query that it has no recording of."""
NOT_INDEX = {"retriever", "num_documents", "default_topk", "fingerprint", "limits", "memory",
             "corpus", "encoder"}  # fmt: skip
"""Keys of `/info` that do not describe the backend and its index."""


class ServedTool(Tool):
    """Mixin for tools over a retrieval server; a subclass defines the test request."""

    options: ServerConfig
    """The server's address and limits."""
    max_outage_option = "retriever.max_outage"
    fix = FIX

    @property
    def max_outage(self) -> float:  # type: ignore[override]
        return self.options.max_outage

    @property
    def label(self) -> str:
        return self.options.url

    async def send_test_request(self, client: RetrievalClient) -> str:
        """Send the request of one typical call; return what is odd about the answer, or ''.

        Raises the client's errors, or ToolRefused for an answer that no run can use.
        """
        raise NotImplementedError

    def probe(self, seconds: float) -> str:
        """Send the test request; see `Tool.probe`."""
        return self._find_problem(self.options.url, seconds)

    def preflight(self, seconds: float) -> Iterator[ToolError]:
        """Yield an error per address that fails the test request, which checks token and limits."""
        # The first search after a server's start may be slow.
        seconds = max(seconds, min(self.options.timeout, PROBE_TIMEOUT_S))
        for address in map(str.strip, self.options.url.split(",")):
            try:
                problem = self._find_problem(address, seconds, logger.warning)
            except ToolRefused as error:
                yield error
                continue
            if problem:
                expected = 'an answer {"result": [...]} to POST /retrieve'
                fix = f"{FIX} and set retriever.url=http://HOST:PORT/retrieve"
                yield ToolError(explain(f"retriever.url={address}", problem, expected, fix))

    def _find_problem(
        self, url: str, seconds: float, tell: Callable[[str], object] = logger.debug
    ) -> str:
        """Return the problem of a server, or ''; takes at most `seconds`. Raises ToolRefused.

        `tell` is called with what is odd, but no problem.
        """
        try:
            if odd := loops.run(self._test(url, seconds)):
                tell(odd)
        except RetrieverUnavailable as error:
            return error.reason
        except RetrieverRefused as error:
            if error.status is None:  # not a retriever's response, so this may be temporary
                return str(error)
            raise ToolRefused(f"{self.name}: {error}") from error
        return ""

    async def _test(self, url: str, seconds: float) -> str:
        """Send the test request, up to three times: a single error does not count as an outage."""
        options = self.options
        async with RetrievalClient(
            url, options.topk, timeout=min(options.timeout, PROBE_TIMEOUT_S), max_retries=2,
            deadline=seconds, log_level=logging.DEBUG,
        ) as client:  # fmt: skip
            try:
                return await self.send_test_request(client)
            except RetrieverRefused as error:
                if error.status != UNRECORDED_QUERY:
                    raise
                # A replay server works even if it has no recording of the test query.
                if (await client.info()).get("retriever") != REPLAY:
                    raise
                return ""


class ServedSearch(ServedTool, SearchTool):
    """The tool `search` over a run's retrieval server."""

    def __init__(self, options: ServerConfig, config: Config | None = None) -> None:
        """`config`: the run, some of whose questions preflight asks. Raises ConfigError."""
        self.client = build_client(options)
        super().__init__(self.client, options)
        self.config = config

    def preflight(self, seconds: float) -> Iterator[ToolError]:
        """Yield the errors of the test requests, or else of documents for the run's questions."""
        from search_r1.agent.served_documents import mixture_problems  # noqa: PLC0415 - rows

        if not (problems := list(super().preflight(seconds))):
            addresses = read_urls(self.options.url)
            served = {url: fingerprints_of(url, self.options) for url in addresses}
            problems = list(mixture_problems(self.label, served))
        yield from problems
        if problems or self.config is None:
            return
        try:
            for odd in loops.run(self._examine(self.config)):
                logger.warning(odd)
        except ToolRefused as error:
            yield error
        except SearchError as error:
            logger.warning("%s: not checked with questions of the run: %s", self.label, error)

    async def _examine(self, config: Config) -> list[str]:
        """Ask for documents for some of the run's questions; return what is odd about them."""
        from search_r1.agent import served_documents  # noqa: PLC0415 - reads rows

        asked = served_documents.questions_of(config.data)
        timeout = min(self.options.timeout, PROBE_TIMEOUT_S)
        async with RetrievalClient(
            self.options.url, self.options.topk, timeout=timeout, max_retries=1, deadline=timeout,
        ) as client:  # fmt: skip
            where, rule = f"retriever.url={self.label}", config.reward_model.normalize
            return await served_documents.examine(client, where, asked, rule)

    async def send_test_request(self, client: RetrievalClient) -> str:
        """Search with the run's token and topk. Raises ToolRefused if no document has a text."""
        documents = await client.search(TEST_QUERY)
        where = f"retriever.url={self.label}"
        if not documents:
            return (
                f"{where}: no documents for {TEST_QUERY!r}; check that it serves the run's corpus"
            )
        if count_blank(documents) < len(documents):
            return ""
        got = f"{len(documents)} documents without text for {TEST_QUERY!r}"
        raise ToolRefused(explain(where, got, "passages", "serve a corpus with texts"))

    def identity(self) -> Mapping[str, str]:
        """Return fingerprints of `corpus`, `index` (the backend's settings) and `encoder`.

        Empty for servers without this form of `/info`, such as the original Search-R1 server, and
        if the request fails.
        """
        return fingerprints_of(self.options.url, self.options)

    async def aclose(self) -> None:
        await self.client.aclose()


def fingerprints_of(url: str, options: ServerConfig) -> dict[str, str]:
    """Return what `ServedSearch.identity` does, of the servers at `url`."""
    timeout = min(options.timeout, PROBE_TIMEOUT_S)

    async def fetch() -> dict[str, Any]:
        async with RetrievalClient(url, timeout=timeout, max_retries=1, deadline=timeout) as client:
            return await client.info()

    try:
        return info_fingerprints(loops.run(fetch()))
    except SearchError:
        return {}


def info_fingerprints(info: Mapping[str, Any]) -> dict[str, str]:
    """Compute the fingerprints of a response to `/info`."""
    parts = {name: info[name] for name in ("corpus", "encoder") if isinstance(info.get(name), dict)}
    backend = {name: value for name, value in info.items() if name not in NOT_INDEX}
    if backend:
        parts["index"] = backend
    return {name: fingerprint(facts) for name, facts in parts.items()}


def build_client(options: ServerConfig) -> RetrievalClient:
    """Build the client of a run's retrieval server. Raises ConfigError for an invalid address."""
    try:
        return RetrievalClient(
            options.url,
            options.topk,
            timeout=options.timeout,
            max_retries=options.max_retries,
            deadline=options.deadline,
        )
    except ValueError as error:
        raise ConfigError(f"retriever: {error}") from error


def python_retriever(config: Config) -> Any:
    """Return the retriever that was passed from Python; None if `retriever.url` names none."""
    url = config.retriever.url
    if not url.startswith(plugins.PYTHON_PREFIX):
        return None
    return plugins.build("retriever.url", url, {}, config, needs="search")


def build_search(config: Config) -> SearchTool:
    """Build a run's tool over its server, a retriever passed from Python, or nothing (`empty`)."""
    options = config.retriever
    if (retriever := python_retriever(config)) is not None:
        return SearchTool(retriever, options)
    if options.url == EMPTY_URL:
        return SearchTool(EmptyRetrieval(), options)
    return ServedSearch(options, config)
