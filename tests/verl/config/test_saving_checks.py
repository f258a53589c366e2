"""Invalid options of saving are refused before a run."""

import pytest

from verl.config import cli
from verl.errors import ConfigError

REQUIRED = ["data.train_files=t", "data.val_files=v", "actor_rollout_ref.model.path=m"]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("trainer.save_minutes=0", "trainer.save_minutes: got 0.0, expected more than 0, or null"),
        ("trainer.time_limit=-5", "trainer.time_limit: got -5.0"),
        ("trainer.keep_last=0", "1 or more, or null; fix: trainer.keep_last=null, the default"),
        ("trainer.keep_best=-1", "trainer.keep_best: got -1"),
        ("trainer.best_metric=score", "a metric of validation"),
    ],
)
def test_invalid_saving_options_are_refused(option: str, message: str) -> None:
    """Each message names the option and the fix."""
    with pytest.raises(ConfigError) as caught:
        cli.compose([*REQUIRED, option])
    assert message in str(caught.value)
    assert "fix:" in str(caught.value)


def test_valid_saving_options_are_accepted() -> None:
    """Options arrive with their types, including lists."""
    options = ["trainer.save_minutes=30", "trainer.keep_last=3", "trainer.best_metric=val/em",
               "trainer.resume_anyway=[data,corpus]", "trainer.async_save=true"]  # fmt: skip
    config = cli.compose([*REQUIRED, *options])
    assert config.trainer.resume_anyway == ["data", "corpus"]
    assert (config.trainer.keep_last, config.trainer.save_minutes) == (3, 30.0)
