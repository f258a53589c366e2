"""Tools from plain functions: their schema, their results, and what is no such function."""

import asyncio
from pathlib import Path

import pytest

from search_r1.agent.generation import build_environment
from verl.agent.environment import Environment
from verl.agent.interface import ToolCall
from verl.config import Config
from verl.errors import ConfigError

FILE = '''
from verl.agent.interface import Tool, text_arguments
from verl.config import Config

def power(base: float, exponent: int = 2) -> float:
    """Raise a number to a power.

    Args:
        base: the number
        exponent: the power
    """
    return base ** exponent

async def shout(text: str) -> str:
    """Write in capitals.

    Args:
        text: what to write
    """
    return text.upper()

def undescribed(text: str) -> str:
    """Write in capitals."""
    return text

def factory(config: Config) -> Tool:
    """Build a tool."""
    tool = Tool(config)
    tool.name, tool.parameters = "made", text_arguments(x="x")
    return tool
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


def built(*names: str) -> Environment:
    config = Config()
    config.agent.tools = list(names)
    return build_environment(config)


def test_hints_and_docstring_become_the_schema(file: Path) -> None:
    """Names, types, meanings and defaults are those of the function."""
    [tool] = built(f"{file}:power").tools
    function = tool.schema["function"]
    assert (function["name"], function["description"]) == ("power", "Raise a number to a power.")
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "base": {"type": "number", "description": "the number"},
            "exponent": {"type": "integer", "description": "the power"},
        },
        "required": ["base"],
    }


def test_calls_return_text_or_json(file: Path) -> None:
    """Functions run whether or not they are asynchronous; wrong types never reach them."""
    environment = built(f"{file}:power", f"{file}:shout", f"{file}:factory")
    calls = [
        ToolCall("power", {"base": 3}),
        ToolCall("power", "3"),
        ToolCall("shout", "é"),
        ToolCall("power", {"base": "x"}),
    ]
    found = [o.items[0].text for o in asyncio.run(environment.act(calls))]
    assert found[:3] == ["9", "9", "É"]
    assert found[3].startswith("Error: base of power")
    assert environment.tools[-1].name == "made"


def test_an_argument_without_meaning_is_refused(file: Path) -> None:
    """The error names the function and what its docstring lacks."""
    with pytest.raises(ConfigError, match=r"^agent.tools: undescribed: got .*text.*Args.*fix: "):
        built(f"{file}:undescribed")
