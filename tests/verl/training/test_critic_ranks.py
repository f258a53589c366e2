"""A critic with its own ranks trains and is saved as one on the actor's ranks."""

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
from verl.training.shards import read_records, shard_folders

SHARED, ONE, TWO = 0, 1, 2
"""The critic's own ranks: none (on the actor's rank), one or two."""


def train(model: str, critics: int, out: Path, start: Path | None = None, lora: int = 0) -> Any:
    """Return the results of the ranks, which save a checkpoint in `out` unless given a `start`."""
    start_path = None if start is None else str(start)
    arguments = (free_port(), model, critics, start_path, str(out), lora)
    return run_ranks(max(critics, 1), critic_bodies.run, *arguments)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Run the same training with each placement of the critic."""
    root = tmp_path_factory.mktemp("critic")
    model = save_tiny(root / "model")
    outs = {where: root / str(where) / "global_step_1" for where in (SHARED, ONE, TWO)}
    answers = {where: train(model, where, out) for where, out in outs.items()}
    return SimpleNamespace(model=model, outs=outs, answers=answers)


def test_placement_does_not_change_training(runs: SimpleNamespace) -> None:
    """Losses, values and weights are bit-identical on one rank, and equal up to rounding on two."""
    shared, one = (runs.answers[where][0] for where in (SHARED, ONE))
    assert shared["problem"] == one["problem"] == ""
    assert {name: one[name] for name in ("actor", "critic")} == {
        name: shared[name] for name in ("actor", "critic")
    }
    assert torch.equal(one["values"], shared["values"]) and shared["values"].any()
    two = runs.answers[TWO]
    assert two[0]["actor"] == shared["actor"] and two[0]["critic"] == two[1]["critic"]
    for actual, expected in zip(two[0]["critic"], shared["critic"], strict=True):
        actual.pop("critic/num_micro_batches")
        assert actual == pytest.approx({k: expected[k] for k in actual}, rel=1e-4, abs=1e-6)
    weights = [load_file(out / "weights/model.safetensors") for out in runs.outs.values()]
    assert all(torch.equal(x, one[name]) for one in weights[1:] for name, x in weights[0].items())


@pytest.mark.parametrize(
    ("saved", "resumed"), [(ONE, ONE), (ONE, SHARED), (SHARED, ONE), (TWO, SHARED), (SHARED, TWO)]
)
def test_a_checkpoint_is_resumed_with_another_placement(
    saved: int, resumed: int, runs: SimpleNamespace, tmp_path: Path
) -> None:
    """The next update is the uninterrupted run's: exactly, unless the numbers of ranks differ."""
    resumed_run = train(runs.model, resumed, tmp_path, runs.outs[saved])[0]
    uninterrupted = runs.answers[SHARED][0]
    assert resumed_run["actor"] == uninterrupted["actor"][1:]
    (critic,), expected = resumed_run["critic"], uninterrupted["critic"][1]
    if TWO in (saved, resumed):
        critic.pop("critic/num_micro_batches")
        assert critic == pytest.approx({k: expected[k] for k in critic}, rel=1e-4, abs=1e-6)
    else:
        assert critic == expected


def test_a_checkpoint_has_a_folder_for_the_critic_and_exports_the_policy(
    runs: SimpleNamespace, tmp_path: Path
) -> None:
    """The folder has a file for each of the critic's ranks; the export is the trained policy."""
    out = runs.outs[TWO]
    assert shard_folders(out) == [out, out / "critic"] and shard_folders(runs.outs[SHARED]) == [
        runs.outs[SHARED]
    ]
    names = sorted(path.name for path in (out / "critic/shards").glob("*.distcp"))
    assert names == ["__0_0.distcp", "__1_0.distcp"]
    assert sorted(path.name for path in (out / "critic/ranks").iterdir()) == [
        "rank_0.pt", "rank_1.pt"]  # fmt: skip
    (out / folders.MARKER).touch()
    exported = AutoModelForCausalLM.from_pretrained(export(out, tmp_path / "hf", dtype="float32"))
    assert exported.num_parameters() > 0


def test_adapters_are_resumed_with_another_placement(runs: SimpleNamespace, tmp_path: Path) -> None:
    """On its own ranks, the critic's adapter has a separate base; both placements resume either."""
    outs = {where: tmp_path / str(where) / "global_step_1" for where in (SHARED, ONE)}
    whole = {where: train(runs.model, where, out, lora=2)[0] for where, out in outs.items()}
    records = [read_records(out) for out in outs.values()]
    assert records[0] == records[1] and set(records[0]) == {"actor", "critic"}
    for saved, resumed in ((SHARED, ONE), (ONE, SHARED)):
        resumed_run = train(runs.model, resumed, tmp_path / "again", outs[saved], lora=2)[0]
        for name in ("actor", "critic"):
            assert resumed_run[name] == whole[saved][name][1:]
