"""Shared parts of the tools that use the retrieval server: client, probes and preflight checks."""

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from search_r1 import loops
from search_r1.retrieval.client import REQUEST_LEVEL_STATUSES, RetrievalClient
from search_r1.retrieval.errors import RetrieverRefused, RetrieverUnavailable, SearchError
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


class RetrieverTool(Tool):
    """Base class of tools over a retrieval server; a subclass defines the test request."""

    max_outage_option = "retriever.max_outage"
    fix = FIX

    def __init__(self, options: ServerConfig | None = None) -> None:
        """`options`: the server's address and limits, for probes and messages; None: no server."""
        self.options = options or ServerConfig(url=EMPTY_URL)
        self.max_outage = self.options.max_outage

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
        url = self.options.url
        return "" if url == EMPTY_URL else self._find_problem(url, seconds)

    def preflight(self, seconds: float) -> Iterator[ToolError]:
        """Yield an error per address that fails the test request, which checks token and limits."""
        if self.options.url == EMPTY_URL:
            return
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


def to_tool_error(error: SearchError, faults: Mapping[str, int]) -> ToolError:
    """Convert a search error: ToolRefused if every other call would be refused as well."""
    is_refused = isinstance(error, RetrieverRefused) and error.status in REQUEST_LEVEL_STATUSES
    return (ToolRefused if is_refused else ToolError)(str(error), faults)


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
