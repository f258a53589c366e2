"""Serve the retriever as a tool of the Model Context Protocol (MCP).

The tool `search` queries a `/retrieve` server; transports are stdio and streamable HTTP.
"""

import sys
from dataclasses import dataclass
from functools import partial
from typing import Literal

from search_r1.options import Port, run
from search_r1.retrieval.errors import install_command
from verl.errors import ConfigError, explain


@dataclass(frozen=True, kw_only=True)
class McpOptions:
    """The retrieval server, and how the tool is served."""

    retriever_url: str = "http://127.0.0.1:8000"
    """retrieval server(s), separated by commas"""
    transport: Literal["stdio", "streamable-http"] = "stdio"
    """transport to clients"""
    host: str = "127.0.0.1"
    """address to listen on, for streamable-http"""
    port: Port = 8003
    """port to listen on, for streamable-http"""


def start(options: McpOptions) -> int:
    """Serve and return the exit code. Raises ConfigError if the MCP package is not installed."""
    try:  # optional and slow to import
        from search_r1.mcp_tool import start as serve  # noqa: PLC0415
    except ImportError as error:  # not installed, or too old
        expected = "the package of the Model Context Protocol"
        raise ConfigError(explain("mcp", str(error), expected, install_command("mcp"))) from error
    return serve(**vars(options))


main = partial(run, "search_r1.mcp_server:start", McpOptions, prog="search-r1 mcp",
               description=__doc__)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
