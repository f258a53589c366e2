"""Tools taken together, and what becomes of the faults of a user's own."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from verl import plugins
from verl.agent.environment import Environment, read_arguments
from verl.agent.interface import Observation, Tool, ToolCall, text_arguments
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
def test_whatever_an_own_tool_does_refuses_the_run_in_one_line(
    tmp_path: Path, body: str, got: str
) -> None:
    """Told are the tool, its arguments, and what it raised, with the line, or gave."""
    told = rf"^tool own, called with \{{'x': 'a b'\}}: got {got}, expected an Observation .*fix: "
    with pytest.raises(ToolRefused, match=told) as caught:
        called(own(tmp_path, f"async def call(self, x): {body}"))
    assert "\n" not in str(caught.value)


def test_what_an_own_tool_says_in_our_words_stays(tmp_path: Path) -> None:
    """A ToolError is a failure that another try may not have; so is one derived from it."""
    environment = own(tmp_path, "async def call(self, x): raise type('Mine', (ToolError,), {})(x)")
    with pytest.raises(ToolError, match=r"^a b$") as caught:
        called(environment)
    assert not isinstance(caught.value, ToolRefused)


@pytest.mark.parametrize("method", ["probe", "preflight", "identity"])
def test_own_answers_about_a_tool_may_fail_too(tmp_path: Path, method: str) -> None:
    """Between steps, where nobody calls it."""
    environment = own(tmp_path, f"def {method}(self, *given): return 1 / 0")
    asked: dict[str, Callable[[], object]] = {
        "probe": lambda: environment.probe(1.0),
        "identity": environment.identity,
        "preflight": lambda: list(environment.preflight(1.0)),
    }
    with pytest.raises(ToolRefused, match=rf"{method} of tool own: got ZeroDivisionError.*line 7"):
        asked[method]()


def test_a_call_that_fails_ends_those_beside_it() -> None:
    """Nobody waits for them any more, and nobody hears of them after the dialogue."""

    class Slow(Tool):
        name, parameters = "own", text_arguments(x="")

        async def call(self, x: str) -> Observation:
            if x == "fails":
                raise ToolError("away")
            await asyncio.sleep(0.05)
            return Observation()

    heard: list[ToolCall] = []
    environment = Environment((Slow(),), on_observation=lambda call, _: heard.append(call))
    calls = [ToolCall("own", x) for x in ("fine", "fails", "fine")]

    async def play() -> None:
        with pytest.raises(ToolError, match="away"):
            await environment.act(calls)
        await asyncio.sleep(0.1)

    asyncio.run(play())
    assert heard == []


def test_a_fault_of_ours_keeps_its_traceback() -> None:
    """What no file of the user's raised is not blamed on one."""

    class Ours(Tool):
        name, parameters = "own", text_arguments(x="")

        async def call(self, **arguments: str) -> Observation:
            raise KeyError(arguments["x"])

    with pytest.raises(KeyError):
        called(Environment((Ours(),)))


@pytest.mark.parametrize(
    ("schema", "given", "expected"),
    [
        ({"type": ["string", "null"]}, None, {"x": None}),
        ({"type": ["integer", "null"]}, "a", "expected integer or null"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, 3, {"x": 3}),
    ],
)
def test_an_argument_may_have_one_of_several_types(
    schema: dict[str, object], given: object, expected: object
) -> None:
    """As JSON schemas say it, and as pydantic does; a text alone is read as one where it may be."""

    class Ours(Tool):
        name, parameters = "own", {"properties": {"x": schema}}

    found = read_arguments(Ours(), ToolCall("own", {"x": given}))
    assert found == expected or (isinstance(expected, str) and expected in found)
    of_text = read_arguments(Ours(), ToolCall("own", "4"))
    assert of_text == {"x": "4" if "string" in str(schema) else 4}
