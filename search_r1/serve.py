"""Serve the agent with an OpenAI-compatible API and a chat page; docs/guides/inference.md."""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from search_r1.inference.agent_options import COMMON, Dialogues, InferenceOptions
from search_r1.options import Bounds, Port, run
from verl.errors import explain

ORIGIN = re.compile(r"https?://[A-Za-z0-9.-]+(:\d+)?")
"""A server's origin as in a content security policy."""


@dataclass(frozen=True, kw_only=True)
class ServingOptions(InferenceOptions):
    """The agent, and the address of its server."""

    COMMON = ("name", "host", "port", *COMMON)

    engine: Literal["vllm", "transformers"] = "vllm"
    """library that generates"""
    concurrency: Dialogues = 256
    """maximum concurrent dialogues"""
    name: str = "search-r1"
    """model name for clients"""
    host: str = "127.0.0.1"
    """address to listen on"""
    port: Port = 8001
    """port to listen on; 0 for any free one"""
    port_file: Path | None = None
    """file to which the port is written once the server is ready"""
    allowed_hosts: tuple[str, ...] = ()
    """accepted names in a request's Host header, besides localhost and the bound address; default:
    none if bound to this machine only, else all (*: any)"""
    chat_peers: tuple[str, ...] = ()
    """http://HOST:PORT of other agent servers; the chat pages of these servers may call each
    other"""
    max_body_bytes: Annotated[int, Bounds(64)] = 8 * 2**20
    """maximum size of a request body in bytes"""

    def conflicts(self) -> Iterator[str]:
        """Yield problems of the agent's options, the name and the peers."""
        yield from super().conflicts()
        if not self.name.strip() or not self.name.isprintable():
            yield explain("--name", repr(self.name), "a printable name", "--name search-r1")
        for peer in self.chat_peers:
            if not ORIGIN.fullmatch(peer):
                yield explain("--chat-peers", repr(peer), "an address without a path",
                              "--chat-peers http://127.0.0.1:8003")  # fmt: skip


main = partial(run, "search_r1.agent_server.service:start", ServingOptions, prog="search-r1 serve",
               description=__doc__)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
