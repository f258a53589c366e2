"""Opens a backend in a user's file, `--retriever_name path/file.py:Name`; checks its members."""

from collections.abc import Callable

from search_r1.retrieval.engines.base import Retriever
from search_r1.retrieval.errors import SetupError
from search_r1.retrieval.settings import RetrieverConfig
from verl.errors import explain
from verl.plugins import build

OPTION = "--retriever_name"
MEMBERS = (*Retriever.__annotations__, "search", "info")
"""What a user's backend must have."""


def opener(config: RetrieverConfig) -> Callable[[RetrieverConfig], Retriever]:
    """Return a function that opens the backend in the user's file, and checks its members."""
    name = config.retriever_name

    def open_retriever(config: RetrieverConfig) -> Retriever:
        built: Retriever = build(OPTION, name, {}, config, needs="search")
        if missing := [member for member in MEMBERS if not hasattr(built, member)]:
            got = f"{name}, whose {type(built).__name__} lacks {', '.join(missing)}"
            expected = f"a retriever with {', '.join(MEMBERS)}"
            raise SetupError(explain(OPTION, got, expected, "add them"))
        return built

    return open_retriever
