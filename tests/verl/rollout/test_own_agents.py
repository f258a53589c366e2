"""User-defined agents in a replica: their errors are reported in one line."""

import asyncio
from pathlib import Path

import pytest

from tests.fakes import ScriptedEngine
from verl import plugins
from verl.config import Config
from verl.errors import PluginError
from verl.rollout.replica import RolloutReplica
from verl.types import Prompt, Sampling, Trajectory, start_trajectory

HEAD = """import dataclasses
from verl.types import Origin, Segment, Trajectory
class Own:
    def __init__(self, config): ...
    async def run(self, start, engine, sampling):
"""


def play(folder: Path, body: str) -> list[Trajectory]:
    file = folder / "own.py"
    file.write_text(f"{HEAD}        {body}\n")
    config = Config()
    config.actor_rollout_ref.rollout.name = "transformers"
    config.agent.name = f"{file}:Own"
    replica = RolloutReplica(config, lambda c: plugins.build("a", c.agent.name, {}, c, "run"), 0)
    replica.engine = ScriptedEngine(["x"])
    start = start_trajectory(Prompt("train#7", (1,), "nq", ("a",)), group="1/0", sample=1)
    return asyncio.run(replica.rollout([start], Sampling(4)))


@pytest.mark.parametrize(
    ("body", "got"),
    [
        ("raise KeyError('x')", r"KeyError: 'x' \(line 6 of .*own.py\)"),
        ("raise SystemExit(2)", r"SystemExit: 2 \(line 6 of .*own.py\)"),
        ("Segment(Origin.POLICY, (1, 2))", r"AssertionError: .* \(line 6 of .*own.py\)"),
        ("return await engine.generate(start.ids)", r"TypeError: .* \(line 6 of .*own.py\)"),
        ("return None", "NoneType"),
        ("return [start]", "list"),
        ("return Trajectory(start.prompt, start.segments)", "group '', sample 0"),
        (
            "start.draw = dataclasses.replace(start.draw, sample=0); return start",
            "group '1/0', sample 0",
        ),
    ],
)
def test_an_error_of_a_user_defined_agent_is_one_line(tmp_path: Path, body: str, got: str) -> None:
    """The message has the option, the row, and the exception with its line, or the result."""
    message = (
        rf"^agent.name={tmp_path}/own.py:Own at train#7: got {got}, expected the trajectory .*fix"
    )
    with pytest.raises(PluginError, match=message) as caught:
        play(tmp_path, body)
    assert "\n" not in str(caught.value)


def test_a_user_defined_agent_works(tmp_path: Path) -> None:
    """If it keeps group and sample of the trajectory."""
    (done,) = play(tmp_path, "start.fail('seen'); return start")
    assert (done.error, done.group, done.sample) == ("seen", "1/0", 1)
