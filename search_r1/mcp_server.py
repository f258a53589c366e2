"""The retriever as a tool of the Model Context Protocol.

The tool `search` asks a `/retrieve` server, over standard input and output or streamable HTTP.
"""

import sys
from dataclasses import dataclass
from functools import partial
from typing import Literal

from search_r1.options import Port, run
from search_r1.search.errors import install_command
from verl.errors import ConfigError, explain


@dataclass(frozen=True, kw_only=True)
class McpOptions:
    """Where the tool searches, and how it is served."""

    retriever_url: str = "http://127.0.0.1:8000"
    """search server(s), with commas between them"""
    transport: Literal["stdio", "streamable-http"] = "stdio"
    """how clients speak to it"""
    host: str = "127.0.0.1"
    """for streamable-http"""
    port: Port = 8002
    """for streamable-http"""


def start(options: McpOptions) -> int:
    """Serve; returns the exit code. Raises ConfigError without the package of the protocol."""
    try:  # an extra, and heavy
        from search_r1.mcp_tool import start as serve  # noqa: PLC0415
    except ImportError as error:  # of an older one too
        expected = "the package of the Model Context Protocol"
        raise ConfigError(explain("mcp", str(error), expected, install_command("mcp"))) from error
    return serve(**vars(options))


main = partial(run, "search_r1.mcp_server:start", McpOptions, prog="search-r1 mcp",
               description=__doc__)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
