"""Invalid options of the collapse guard are refused before a run."""

import pytest

from tests.verl.config.test_cli import REQUIRED
from verl.config import cli
from verl.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("trainer.guard.action=halt", "one of off, warn, stop"),
        ("trainer.guard.action=rollback", "trainer.guard.action: got rollback"),
        ("trainer.guard.patience=0", "trainer.guard.limits.patience: got 0, expected 1 or more"),
        (
            "trainer.guard.patience=2.5",
            "trainer.guard.limits.patience: got 2.5, expected 1 or more",
        ),
        ("trainer.guard.enable=false", "trainer.guard.action=off"),
        ("trainer.guard.rollback_lr_factor=0.5", "trainer.guard.rollback_lr_factor: got 0.5"),
        ("trainer.guard.drift_crash=-1", "trainer.guard.limits.drift_crash: got -1"),
        ("trainer.guard.limits.entropy_share=x", "trainer.guard.limits.entropy_share: got 'x'"),
        ("trainer.guard.limits={drift_dorp:1}", "did you mean drift_drop"),
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
        "trainer.guard.malformed_rise=null trainer.guard.limits.shift_bound=0.5",
        "trainer.guard.action=off trainer.guard.enable=true trainer.guard.baseline_steps=10",
    ],
)
def test_valid_guard_options_are_accepted(options: str) -> None:
    """Rules may be turned off individually or all at once."""
    cli.compose([*REQUIRED, *options.split()])
