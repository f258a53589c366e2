"""Invalid options of the collapse guard are refused before a run."""

import pytest

from verl.config import cli
from verl.errors import ConfigError

REQUIRED = ["data.train_files=t", "data.val_files=v", "actor_rollout_ref.model.path=m"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("trainer.guard.action=halt", "one of warn, stop"),
        ("trainer.guard.action=rollback", "trainer.guard.action: got rollback"),
        ("trainer.guard.patience=0", "trainer.guard.patience: got 0, expected 1 or more"),
        ("trainer.guard.baseline_steps=0", "trainer.guard.baseline_steps"),
        ("trainer.guard.drift_trajectories=-1", "trainer.guard.drift_trajectories: got -1"),
        ("trainer.guard.rollback_lr_factor=0.5", "trainer.guard.rollback_lr_factor: got 0.5"),
        ("trainer.guard.drift_crash=-1", "trainer.guard.drift_crash: got -1.0"),
        (
            "trainer.guard.entropy_share=-0.1",
            "0 or more, or null; fix: trainer.guard.entropy_share=0.1",
        ),
    ],
)
def test_invalid_guard_options_are_refused(options: str, message: str) -> None:
    """Each message names the option and the fix."""
    with pytest.raises(ConfigError) as caught:
        cli.compose([*REQUIRED, *options.split()])
    assert message in str(caught.value)
    assert "fix:" in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        "trainer.guard.action=stop trainer.guard.max_rollbacks=2",
        "trainer.guard.malformed_rise=null trainer.guard.drift_trajectories=0",
        "trainer.guard.enable=false trainer.guard.action=stop",
    ],
)
def test_valid_guard_options_are_accepted(options: str) -> None:
    """Rules may be turned off individually or all at once."""
    cli.compose([*REQUIRED, *options.split()])
