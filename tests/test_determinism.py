"""The same seed twice, by the real trainer: what must be the same, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.proofs.kills.compare import differences, is_computed, read_rows, same_weights
from tests.test_end_to_end import start_world, train

pytestmark = pytest.mark.vllm_cpu

PPO = ("algorithm.adv_estimator=gae", "trainer.n_gpus_per_node=2", "trainer.deterministic=true",
       "trainer.total_training_steps=5", "trainer.test_freq=2")  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A tiny model, eight rows, a retriever."""
    with start_world(tmp_path_factory.mktemp("world")) as found:
        yield found


@pytest.fixture(scope="module")
def first(world: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five steps of PPO on two ranks, with a checkpoint in the middle."""
    out = tmp_path_factory.mktemp("first")
    train(world, out, *PPO, "trainer.save_freq=3")
    return out


@pytest.mark.slow
def test_a_run_is_computed_again_bit_for_bit(
    world: dict[str, str], first: Path, tmp_path: Path
) -> None:
    """All metrics but clocks, at every step and validation, and the trained weights."""
    again = tmp_path / "again"
    rows = train(world, again, *PPO, "trainer.save_freq=0")
    assert list(differences(read_rows(first / "metrics.jsonl"), rows)) == []
    assert same_weights(first / "model", again / "model")
    assert len(rows) == 6  # before the first step, and five steps
    assert {"actor/grad_norm", "critic/vf_loss", "critic/kl"} <= set(filter(is_computed, rows[-1]))


@pytest.mark.slow
def test_a_resumed_run_is_the_unbroken_one_bit_for_bit(
    world: dict[str, str], first: Path, tmp_path: Path
) -> None:
    """Steps 4 and 5 from step 3's checkpoint, validations included, and the trained weights."""
    rest = tmp_path / "rest"
    mode = f"trainer.resume_mode={first / 'global_step_3'}"
    rows = train(world, rest, *PPO, "trainer.save_freq=0", mode)
    unbroken = [row for row in read_rows(first / "metrics.jsonl") if row["step"] in (4, 5)]
    assert list(differences(unbroken, rows)) == []
    assert same_weights(first / "model", rest / "model")
