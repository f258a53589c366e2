"""The environment of several tools, and errors in user-defined tools."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from verl import plugins
from verl.agent.environment import Environment, read_arguments
from verl.agent.interface import Observation, Tool, ToolCall, text_arguments
from verl.agent.served import fingerprints, tool_problems, unavailable
from verl.errors import ToolError, ToolRefused

HEAD = """import json, sys
from verl.agent.interface import Item, Observation, Tool, text_arguments
from verl.errors import ToolError
class Own(Tool):
    name, parameters = "own", text_arguments(x="")
    async def call(self, x): return Observation((Item("fine"),))
"""


def own(folder: Path, method: str) -> Environment:
    file = folder / "own.py"
    file.write_text(f"{HEAD}    {method}\n")
    return Environment((plugins.build("agent.tools", f"{file}:Own", {}, None, "name"),))


def called(environment: Environment) -> Observation:
    return asyncio.run(environment.call(ToolCall("own", "a b")))


@pytest.mark.parametrize(
    ("body", "got"),
    [
        ("raise RuntimeError('one\\ntwo')", r"RuntimeError: one two \(line 7 of .*own.py\)"),
        ("json.loads('{')", r"JSONDecodeError: .* \(line 7 of .*own.py\)"),
        ("sys.exit(1)", r"SystemExit: 1 \(line 7 of .*own.py\)"),
        ("return await super().call(x=x)", r"NotImplementedError: \(line 7 of .*own.py\)"),
        ("return None", "None"),
        ("return 'fine'", "'fine'"),
        ("return Observation('fine')", r"Observation\(items='fine'.*"),
        ("return Observation(Item('fine'))", r"Observation\(items=Item.*"),
        ("return Observation(['fine'])", r"Observation\(items=\['fine'\].*"),
        ("return Observation((Item(3),))", r"Observation\(items=\(Item\(text=3.*"),
        ("return Observation((Item(None),))", r"Observation\(items=\(Item\(text=None.*"),
        ("return Observation((Item('a', 3),))", r"Observation\(items=\(Item\(text='a', title=3.*"),
    ],
)
def test_an_error_in_a_user_defined_tool_refuses_the_run_in_one_line(
    tmp_path: Path, body: str, got: str
) -> None:
    """The message has the tool, its arguments, and the exception with its line, or the result."""
    message = (
        rf"^tool own, called with \{{'x': 'a b'\}}: got {got}, expected an Observation .*fix: "
    )
    with pytest.raises(ToolRefused, match=message) as caught:
        called(own(tmp_path, f"async def call(self, x): {body}"))
    assert "\n" not in str(caught.value)


def test_a_tool_error_of_a_user_defined_tool_is_passed_on(tmp_path: Path) -> None:
    """A ToolError, or a subclass, is a failure that may not happen again."""
    environment = own(tmp_path, "async def call(self, x): raise type('Mine', (ToolError,), {})(x)")
    with pytest.raises(ToolError, match=r"^a b$") as caught:
        called(environment)
    assert not isinstance(caught.value, ToolRefused)


@pytest.mark.parametrize("method", ["probe", "preflight", "identity"])
def test_errors_in_other_methods_refuse_the_run_too(tmp_path: Path, method: str) -> None:
    """These methods are called between steps."""
    environment = own(tmp_path, f"def {method}(self, *arguments): return 1 / 0")
    methods: dict[str, Callable[[], object]] = {
        "probe": lambda: unavailable(environment, 1.0),
        "identity": lambda: fingerprints(environment),
        "preflight": lambda: list(tool_problems(environment, 1.0)),
    }
    with pytest.raises(ToolRefused, match=rf"{method} of tool own: got ZeroDivisionError.*line 7"):
        methods[method]()


def test_a_failed_call_cancels_the_other_calls_of_the_turn() -> None:
    """They are not waited for, and not reported after the dialogue."""

    class Slow(Tool):
        name, parameters = "own", text_arguments(x="")

        async def call(self, x: str) -> Observation:
            if x == "fails":
                raise ToolError("away")
            await asyncio.sleep(0.05)
            return Observation()

    reported: list[ToolCall] = []
    environment = Environment((Slow(),), on_observation=lambda call, _: reported.append(call))
    calls = [ToolCall("own", x) for x in ("fine", "fails", "fine")]

    async def play() -> None:
        with pytest.raises(ToolError, match="away"):
            await environment.act(calls)
        await asyncio.sleep(0.1)

    asyncio.run(play())
    assert reported == []


def test_an_error_of_a_built_in_tool_keeps_its_traceback() -> None:
    """Only errors raised in a user's file are converted."""

    class Ours(Tool):
        name, parameters = "own", text_arguments(x="")

        async def call(self, **arguments: str) -> Observation:
            raise KeyError(arguments["x"])

    with pytest.raises(KeyError):
        called(Environment((Ours(),)))


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        ({"type": ["string", "null"]}, None, {"x": None}),
        ({"type": ["integer", "null"]}, "a", "expected integer or null"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, 3, {"x": 3}),
    ],
)
def test_an_argument_may_have_one_of_several_types(
    schema: dict[str, object], value: object, expected: object
) -> None:
    """Written as in JSON schemas or by pydantic; a plain text stays one if the schema allows it."""

    class Ours(Tool):
        name, parameters = "own", {"properties": {"x": schema}}

    found = read_arguments(Ours(), ToolCall("own", {"x": value}))
    assert found == expected or (isinstance(expected, str) and expected in found)
    of_text = read_arguments(Ours(), ToolCall("own", "4"))
    assert of_text == {"x": "4" if "string" in str(schema) else 4}


@pytest.mark.parametrize("text", ['"4"', "[4]", "four", "[" * 9999])
def test_a_plain_text_must_have_a_type_of_the_schema_too(text: str) -> None:
    """JSON of another type is the policy's mistake, like a text that cannot be parsed as JSON."""

    class Ours(Tool):
        name, parameters = "own", {"properties": {"x": {"type": "integer"}}}

    assert "expected integer" in read_arguments(Ours(), ToolCall("own", text))
