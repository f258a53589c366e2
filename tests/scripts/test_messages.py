"""The table of messages equals what the code produces."""

import ast

from scripts.messages import messages, rows

MODULE = """
def check(key, path, ok):
    got, fix = f"{path} (no such folder)", "correct it"
    if ok:
        raise ConfigError(explain(key, got, "a folder", fix))
    yield (not ok, "max_turns", 0, "1 or more", "set max_turns=2")
    raise SetupError(f"index {path} is gone; expected " "a file: build it")
    raise ValueError("no message for users")

async def ask(url):
    raise ToolError(explain("url", url, "an address", "correct it"))
"""


def test_explained_rows_and_raised_texts_are_found() -> None:
    """Variables are replaced by their texts, and what is only known at run time by an ellipsis."""
    assert sorted(messages(ast.parse(MODULE))) == [
        "index … is gone; expected a file: build it",
        "max_turns: got 0, expected 1 or more; fix: set max_turns=2",
        "url: got …, expected an address; fix: correct it",
        "…: got … (no such folder), expected a folder; fix: correct it",
    ]


def test_our_sources_have_hundreds() -> None:
    """Messages of the trainer and of the servers are found."""
    modules = [module for _, module in rows()]
    assert len(modules) > 300 and {"verl/config/rules.py", "search_r1/retrieval/client.py"} <= {
        *modules
    }
