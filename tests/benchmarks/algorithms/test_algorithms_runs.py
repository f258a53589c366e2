"""The runs of the algorithms' benchmark, and their results on disk."""

from functools import cache
from pathlib import Path

import pytest

from benchmarks.algorithms.__main__ import plan, results
from benchmarks.algorithms.runner import Result
from benchmarks.algorithms.variants import COMMON, NUM_TRAJECTORIES, VARIANTS
from verl.config import Config, cli

RESULT = Result(1, ["a=b"], [(0, 0.25), (8, 0.5)], 1.0, 0.5, 0.1, 0.2, 3.0, 4.0)


@cache
def compose(name: str) -> Config:
    """Return the configuration of a variant."""
    paths = ["actor_rollout_ref.model.path=m", "data.train_files=t", "data.val_files=v"]
    return cli.compose([*paths, *COMMON, *VARIANTS[name]])


def test_a_result_is_read_as_it_was_written(tmp_path: Path):
    """A result survives the way through its file unchanged, without leftover files."""
    assert Result.read(tmp_path) is None
    RESULT.write(tmp_path)
    assert Result.read(tmp_path) == RESULT
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]


def test_only_runs_without_a_result_remain(tmp_path: Path):
    """An interrupted benchmark continues where it stopped; a half-written result does not count."""
    runs = plan(["ppo", "grpo"], [0, 1], tmp_path)
    assert [(run.variant, run.seed) for run in runs] == [
        ("ppo", 0), ("grpo", 0), ("ppo", 1), ("grpo", 1),
    ]  # fmt: skip
    for run in runs[:2]:
        run.folder.mkdir(parents=True)
    RESULT.write(runs[0].folder)
    (runs[1].folder / "result.json.part").write_text("{")
    assert [run.is_done for run in runs] == [True, False, False, False]
    assert results(["ppo", "grpo"], [0, 1], tmp_path) == {"ppo": [RESULT], "grpo": []}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_accepted_and_has_the_same_budget(name: str):
    """All variants have the same number of trajectories, steps and updates."""
    config, reference = compose(name), compose("grpo")
    assert config.num_trajectories == NUM_TRAJECTORIES
    assert config.updates_per_step == reference.updates_per_step >= 2
    assert config.trainer.total_training_steps == reference.trainer.total_training_steps
    assert not config.needs_reference
