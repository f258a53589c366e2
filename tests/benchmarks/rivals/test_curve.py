"""Reading, comparing and drawing the learning curves of both sides."""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rivals.clock import CPU, LOAD, tree_seconds
from benchmarks.rivals.curve import (
    OURS,
    TRL,
    Curve,
    apart,
    bands,
    draw,
    read_curve,
    shared_options,
    table,
)
from verl.config import cli

ROWS = [{"step": 0, "em": 0.2}, {"step": 1, "wall": 9.0, "cpu": 9.0, "load": 9.0, "em": 0.9},
        {"step": 1, "wall": 2.0, "cpu": 1.0, "load": 3.0},
        {"step": 2, "wall": 4.0, "cpu": 3.0, "load": 5.0, "em": 0.4}]  # fmt: skip
OUR_NAMES = {"step": "step", "em": "val/em", "wall": "timing_s/step", "cpu": CPU, "load": LOAD}


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("side", [OURS, TRL])
def test_a_run_that_went_on_from_a_checkpoint_counts_each_step_once(
    side: str, tmp_path: Path
) -> None:
    """The last row of a step counts, and validated steps have the seconds spent before them."""
    if side == OURS:
        ours = [{OUR_NAMES[key]: value for key, value in row.items()} for row in ROWS]
        write(tmp_path / "metrics.jsonl", ours)
    else:
        write(tmp_path / "curve.jsonl", ROWS)
    curve = read_curve(side, 7, tmp_path)
    assert curve == Curve(side, 7, {0: 0.2, 2: 0.4}, [2.0, 4.0], [1.0, 3.0], [3.0, 5.0])
    assert (curve.spent(curve.wall), curve.spent(curve.cpu)) == ([0, 6], [0, 4])


def curve(side: str, seed: int, em: Mapping[int, float]) -> Curve:
    return Curve(side, seed, em, [2.0] * 4, [1.0] * 4, [3.0] * 4)


CURVES = [
    curve(OURS, 0, {0: 0.2, 2: 0.5, 4: 0.9}),
    curve(OURS, 1, {0: 0.2, 2: 0.7, 4: 0.9}),
    curve(TRL, 0, {0: 0.2, 2: 0.6, 4: 0.5}),
    curve(TRL, 1, {0: 0.2, 2: 0.9, 4: 0.75}),
]


def test_bands_are_apart_where_no_seed_of_one_side_reaches_the_other() -> None:
    """Overlap and touching are 0; otherwise it is the gap between the nearest seeds."""
    by_step = bands(CURVES)
    assert by_step[2] == {OURS: (0.5, 0.7), TRL: (0.6, 0.9)}
    assert {step: apart(band) for step, band in by_step.items()} == {
        0: 0, 2: 0, 4: pytest.approx(0.15),
    }  # fmt: skip


def test_the_table_and_the_picture_have_both_sides(tmp_path: Path) -> None:
    """Mean and range of the seeds, the gap, and the seconds of a step."""
    text = table(CURVES)
    assert "| 4 | 0.900 (0.900 to 0.900) | 0.625 (0.500 to 0.750) | 0.150 |" in text
    assert f"| {TRL} | 1.00 (1.00 to 1.00) | 2.0 (2.0 to 2.0) | 3 (3 to 3) |" in text
    draw(CURVES, tmp_path / "curve.svg")
    picture = (tmp_path / "curve.svg").read_text()
    assert f">{OURS}<" in picture and f">{TRL}<" in picture


def test_both_sides_take_one_optimizer_step_on_64_trajectories(tmp_path: Path) -> None:
    """The loss must be on policy for both, since TRL has no ratio then."""
    args = argparse.Namespace(
        policy=tmp_path, train_files=tmp_path / "a", val_files=tmp_path / "b", lr=3e-5, steps=9,
        engine="transformers", test_freq=3, options=["max_turns=4"],
    )  # fmt: skip
    config = cli.compose(shared_options(args, 5, "http://localhost:1/retrieve", tmp_path))
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert config.data.train_batch_size * rollout.n_agent == actor.ppo_mini_batch_size == 64
    assert (actor.optim.lr, actor.optim.weight_decay, actor.ppo_epochs) == (3e-5, 0, 1)
    assert (config.trainer.seed, config.max_turns, rollout.name) == (5, 4, "transformers")
    assert not actor.use_kl_loss and actor.loss_agg_mode == "token-mean"


def test_processor_seconds_include_those_of_running_children() -> None:
    """Ranks and engines are children of the process that trains."""
    before = tree_seconds()
    program = "import time\nwhile time.process_time() < 0.5: pass\nprint(1, flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stdout.readline()
        assert tree_seconds() - before > 0.4
        child.communicate("\n")
