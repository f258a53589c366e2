"""The agent behind an OpenAI-compatible server and a chat page; docs/inference.md."""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from search_r1.inference.options import Dialogues, InferenceOptions
from search_r1.options import Bounds, Port, run
from verl.errors import explain

ORIGIN = re.compile(r"https?://[A-Za-z0-9.-]+(:\d+)?")
"""How a page's policy names a server."""


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
    chat_peers: tuple[str, ...] = ()
    """http://HOST:PORT of other agent servers that the chat page may ask, and whose pages may
    ask this one"""
    max_body_bytes: Annotated[int, Bounds(64)] = 8 * 2**20
    """longest request body, in bytes"""

    def conflicts(self) -> Iterator[str]:
        """Those of the agent, and a name that no client could give."""
        yield from super().conflicts()
        if not self.name.strip() or not self.name.isprintable():
            yield explain("--name", repr(self.name), "a printable name", "--name search-r1")
        for peer in self.chat_peers:
            if not ORIGIN.fullmatch(peer):
                yield explain("--chat-peers", repr(peer), "an address without a path",
                              "--chat-peers http://127.0.0.1:8003")  # fmt: skip


main = partial(run, "search_r1.agent_server.app:start", ServingOptions, prog="search-r1 serve",
               description=__doc__)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
