"""Checks before a run; restarts after a lost rank: from the right checkpoint, not for ever."""

from pathlib import Path

import pytest

from verl.config import Config
from verl.errors import (
    ConfigError,
)
from verl.trainer.run import prepare


@pytest.mark.parametrize("option", ["reward_model.name", "agent.tools"])
def test_missing_user_code_is_reported_first(option: str, tmp_path: Path) -> None:
    """A missing reward or tool ends the run before its model or machine is checked."""
    config = Config()
    config.trainer.default_local_dir = str(tmp_path / "run")
    missing = str(tmp_path / "nowhere.py:f")
    if option == "agent.tools":
        config.agent.tools = [missing]
    else:
        config.reward_model.name = missing
    with pytest.raises(ConfigError, match=r"nowhere\.py"):
        prepare(config)
    assert not (tmp_path / "run").exists()
