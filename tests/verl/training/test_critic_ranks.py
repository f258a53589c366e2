"""A critic with ranks of its own learns, and is saved, as the one beside the actor."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.verl.training import critic_bodies
from tests.verl.training.ranks import run_ranks, save_tiny
from verl.checkpoint import folders
from verl.checkpoint.exporting import export
from verl.ports import free_port
from verl.training.shards import read_adapters, shard_folders

BESIDE, ONE, TWO = 0, 1, 2
"""Where the critic is: beside the actor, on a rank of its own, on two."""


def play(model: str, critics: int, out: Path, start: Path | None = None, lora: int = 0) -> Any:
    """What the ranks answered; with a checkpoint in `out` unless they began from one."""
    given = (free_port(), model, critics, None if start is None else str(start), str(out), lora)
    return run_ranks(max(critics, 1), critic_bodies.run, *given)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The same training with the critic in each place."""
    root = tmp_path_factory.mktemp("critic")
    model = save_tiny(root / "model")
    outs = {where: root / str(where) / "global_step_1" for where in (BESIDE, ONE, TWO)}
    answers = {where: play(model, where, out) for where, out in outs.items()}
    return SimpleNamespace(model=model, outs=outs, answers=answers)


def test_it_learns_the_same_wherever_it_is(runs: SimpleNamespace) -> None:
    """Bit for bit on one rank: losses of both, values, weights; on two ranks to rounding."""
    beside, one = (runs.answers[where][0] for where in (BESIDE, ONE))
    assert beside["problem"] == one["problem"] == ""
    assert {name: one[name] for name in ("actor", "critic")} == {
        name: beside[name] for name in ("actor", "critic")
    }
    assert torch.equal(one["values"], beside["values"]) and beside["values"].any()
    two = runs.answers[TWO]
    assert two[0]["actor"] == beside["actor"] and two[0]["critic"] == two[1]["critic"]
    for found, expected in zip(two[0]["critic"], beside["critic"], strict=True):
        found.pop("critic/num_micro_batches")
        assert found == pytest.approx({k: expected[k] for k in found}, rel=1e-4, abs=1e-6)
    weights = [load_file(out / "weights/model.safetensors") for out in runs.outs.values()]
    assert all(torch.equal(x, one[name]) for one in weights[1:] for name, x in weights[0].items())


@pytest.mark.parametrize(
    ("saved", "resumed"), [(ONE, ONE), (ONE, BESIDE), (BESIDE, ONE), (TWO, BESIDE), (BESIDE, TWO)]
)
def test_a_checkpoint_goes_on_wherever_the_critic_is(
    saved: int, resumed: int, runs: SimpleNamespace, tmp_path: Path
) -> None:
    """The update after it is the unbroken run's: exactly, unless numbers of ranks differ."""
    found = play(runs.model, resumed, tmp_path, runs.outs[saved])[0]
    unbroken = runs.answers[BESIDE][0]
    assert found["actor"] == unbroken["actor"][1:]
    (critic,), expected = found["critic"], unbroken["critic"][1]
    if TWO in (saved, resumed):
        critic.pop("critic/num_micro_batches")
        assert critic == pytest.approx({k: expected[k] for k in critic}, rel=1e-4, abs=1e-6)
    else:
        assert critic == expected


def test_a_checkpoint_keeps_the_critic_apart_and_exports_the_policy(
    runs: SimpleNamespace, tmp_path: Path
) -> None:
    """A file for each of its ranks, in a folder of its own; the export is what was trained."""
    out = runs.outs[TWO]
    assert shard_folders(out) == [out, out / "critic"] and shard_folders(runs.outs[BESIDE]) == [
        runs.outs[BESIDE]
    ]
    names = sorted(path.name for path in (out / "critic/shards").glob("*.distcp"))
    assert names == ["__0_0.distcp", "__1_0.distcp"]
    assert sorted(path.name for path in (out / "critic/ranks").iterdir()) == [
        "rank_0.pt", "rank_1.pt"]  # fmt: skip
    (out / folders.MARKER).touch()
    exported = AutoModelForCausalLM.from_pretrained(export(out, tmp_path / "hf", dtype="float32"))
    assert exported.num_parameters() > 0


def test_adapters_of_both_are_known_wherever_the_critic_is(
    runs: SimpleNamespace, tmp_path: Path
) -> None:
    """Apart from the policy the critic's adapter has a base of its own; both resume from either."""
    outs = {where: tmp_path / str(where) / "global_step_1" for where in (BESIDE, ONE)}
    for where, out in outs.items():
        play(runs.model, where, out, lora=2)
    records = [read_adapters(out) for out in outs.values()]
    assert records[0] == records[1] and set(records[0]) == {"actor", "critic"}
    for saved, resumed in ((BESIDE, ONE), (ONE, BESIDE)):
        found = play(runs.model, resumed, tmp_path / "again", outs[saved], lora=2)[0]
        same = play(runs.model, saved, tmp_path / "again", outs[saved], lora=2)[0]
        assert found["critic"] == same["critic"] and found["actor"] == same["actor"]
