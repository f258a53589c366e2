"""What a run is told before anything of it starts."""

from pathlib import Path

import pytest

from verl.config import Config
from verl.errors import ConfigError
from verl.trainer.run import prepare


@pytest.mark.parametrize("option", ["reward_model.name", "agent.tools"])
def test_own_code_that_is_missing_is_told_first(option: str, tmp_path: Path) -> None:
    """A reward or tool that is not there ends the run before its model or machine is looked at."""
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
