"""The agent behind an OpenAI-compatible server, `/v1/chat/completions`; docs/inference.md."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from search_r1.inference.options import Dialogues, InferenceOptions
from search_r1.options import Bounds, Port, run
from search_r1.search.errors import SearchError
from verl.errors import UserError, explain


@dataclass(frozen=True, kw_only=True)
class ServingOptions(InferenceOptions):
    """An agent behind a port."""

    engine: Literal["vllm", "transformers"] = "vllm"
    """what generates"""
    concurrency: Dialogues = 256
    """dialogues at once"""
    name: str = "search-r1"
    """what clients call the model"""
    host: str = "127.0.0.1"
    """address to listen on"""
    port: Port = 8001
    """port to listen on; 0 for any free one"""
    port_file: Path | None = None
    """write the port here once it is served"""
    allowed_hosts: tuple[str, ...] = ()
    """names in a request's Host, beside addresses and localhost; bound to this machine alone no
    others are taken, elsewhere all are until some are given (*: any)"""
    max_body_bytes: Annotated[int, Bounds(64)] = 8 * 2**20
    """longest request body, in bytes"""

    def conflicts(self) -> Iterator[str]:
        """Those of the agent, and a name that no client could give."""
        yield from super().conflicts()
        if not self.name.strip() or not self.name.isprintable():
            yield explain("--name", repr(self.name), "a printable name", "--name search-r1")


def main(argv: Sequence[str] | None = None) -> int:
    """Command-line entry; returns the exit code."""
    return run("search_r1.agent_server.running:start", ServingOptions, argv, prog="search-r1 serve",
               description=__doc__, errors=(UserError, SearchError))  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
