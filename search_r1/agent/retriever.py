"""What tools share that ask the retrieval server: its client, and whether it serves this run."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from search_r1 import loops
from search_r1.search.client import WHOLE_REQUEST, RetrievalClient
from search_r1.search.errors import RetrieverRefused, RetrieverUnavailable, SearchError
from search_r1.search.schema import TOKEN_VARIABLE
from verl import plugins
from verl.agent.interface import Tool
from verl.config import Config
from verl.config.agent import EMPTY_URL, ServerConfig
from verl.errors import ConfigError, ToolError, ToolRefused, explain

Made = TypeVar("Made")

QUERY = "capital of France"
"""What a probe searches for."""
PROBE_S = 30.0
"""Longest that one attempt of a probe, or the question for fingerprints, may take."""
FIX = "start it (bash retrieval_launch.sh)"
OF_ONE_QUERY, REPLAY = 424, "replay"
"""The status of a refusal that says nothing of other queries where the server is a replay."""


class RetrieverTool(Tool):
    """A tool that asks the retrieval server of `options`; a subclass says what its call asks."""

    max_outage_option = "retriever.max_outage"
    fix = FIX

    def __init__(self, options: ServerConfig | None = None) -> None:
        """`options` say where the server is, for probes and messages; None: there is none."""
        self.options = options or ServerConfig(url=EMPTY_URL)
        self.max_outage = self.options.max_outage

    @property
    def label(self) -> str:
        return self.options.url

    async def try_out(self, client: RetrievalClient) -> None:
        """What a call asks of the server, once. Raises what the client raises, or ToolRefused."""
        raise NotImplementedError

    def probe(self, seconds: float) -> str:
        """What is wrong with the server, by what a call asks; see `Tool.probe`."""
        return "" if self.options.url == EMPTY_URL else self._problem(self.options.url, seconds)

    def preflight(self, seconds: float) -> Iterator[ToolError]:
        """Each address that does not serve this run; `/health` needs no token and no limit."""
        if self.options.url == EMPTY_URL:
            return
        seconds = max(seconds, min(self.options.timeout, PROBE_S))  # a first search may be slow
        for address in map(str.strip, self.options.url.split(",")):
            try:
                problem = self._problem(address, seconds)
            except ToolRefused as error:
                yield error
                continue
            if problem:
                expected = 'an answer {"result": [...]} to POST /retrieve'
                fix = f"{FIX} and set retriever.url=http://HOST:PORT/retrieve"
                yield ToolError(explain(f"retriever.url={address}", problem, expected, fix))

    def _problem(self, url: str, seconds: float) -> str:
        """What is wrong there, or an empty text; takes at most `seconds`. Raises ToolRefused."""
        try:
            loops.run(self._ask(url, seconds))
        except RetrieverUnavailable as error:
            return error.reason
        except RetrieverRefused as error:
            if error.status is None:  # not an answer of a retriever: it may yet come back
                return str(error)
            raise ToolRefused(f"{self.name}: {error}") from error
        return ""

    async def _ask(self, url: str, seconds: float) -> None:
        """One call; a second attempt and a third, so that a single error is no outage."""
        options = self.options
        async with RetrievalClient(
            url, options.topk, timeout=min(options.timeout, PROBE_S), max_retries=2,
            deadline=seconds, log_level=logging.DEBUG,
        ) as client:  # fmt: skip
            try:
                await self.try_out(client)
            except RetrieverRefused as error:
                is_alone = error.status == OF_ONE_QUERY
                if not is_alone or (await client.info()).get("retriever") != REPLAY:
                    raise


def failure(error: SearchError, faults: Mapping[str, int]) -> ToolError:
    """What a call raises: ToolRefused where no other call would be answered either."""
    is_refused = isinstance(error, RetrieverRefused) and error.status in WHOLE_REQUEST
    return (ToolRefused if is_refused else ToolError)(str(error), faults)


def build_client(options: ServerConfig) -> RetrievalClient:
    """The client of a run's retrieval server. Raises ConfigError for an address that is none."""
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


def given_retrieval(config: Config) -> Any:
    """What was given from Python to find documents; None where a server is named."""
    url = config.retriever.url
    if not url.startswith(plugins.PYTHON_PREFIX):
        return None
    return plugins.build("retriever.url", url, {}, config, needs="search")


@dataclass(frozen=True)
class WithToken(Generic[Made]):
    """A factory for other nodes, with the retriever's token; Ray would log an environment."""

    make: Callable[[Config], Made]
    token: str | None = field(default_factory=lambda: os.environ.get(TOKEN_VARIABLE), repr=False)

    def __call__(self, config: Config) -> Made:
        """What it makes there, with the token in that process's environment."""
        if self.token is not None:
            os.environ[TOKEN_VARIABLE] = self.token
        return self.make(config)
