"""Liger's kernels are refused where they cannot run."""

import pytest

from verl.config import Config
from verl.ext import kernels


@pytest.mark.parametrize(
    ("device", "installed", "message"),
    [("cpu", "0.6", "on a CPU"), ("cuda", "", "pip install liger-kernel"), ("cuda", "0.6", None)],
)
def test_liger_is_refused_where_it_cannot_run(
    device: str, installed: str, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is a one-line error before anything is loaded."""
    monkeypatch.setattr(kernels, "version_of", lambda _: installed)
    config = Config()
    config.trainer.device = device
    assert not list(kernels.problems(config))
    config.actor_rollout_ref.model.kernels = "liger"
    errors = [str(problem) for problem in kernels.problems(config)]
    assert len(errors) == (message is not None)
    assert all(message in line and "\n" not in line for line in errors)
