"""A run's options from its command line: defaults, overrides, and unknown names."""

import pytest

from verl.config import cli
from verl.errors import ConfigError

REQUIRED = ("data.train_files=a.parquet", "data.val_files=[b.parquet,c.parquet]",
            "actor_rollout_ref.model.path=m")  # fmt: skip


def test_a_command_line_is_composed() -> None:
    """Overrides replace defaults, with and without the plus of options that have none."""
    config = cli.compose(
        [
            *REQUIRED,
            "algorithm.adv_estimator=grpo",
            "+max_turns=3",
            "actor_rollout_ref.rollout.n_agent=5",
        ]
    )
    assert config.data.val_files == ["b.parquet", "c.parquet"]
    assert config.algorithm.adv_estimator == "grpo" and config.max_turns == 3


def test_an_unknown_option_is_refused() -> None:
    """The nearest known name is suggested."""
    with pytest.raises(ConfigError, match=r"algorithm\.adv_estimator"):
        cli.compose([*REQUIRED, "algorithm.adv_estimater=grpo"])
