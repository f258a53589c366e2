"""Checks before a run; restarts after a lost rank: from the right checkpoint, not for ever."""

import json
import logging
from pathlib import Path

import pytest

from tests.fakes import ByteTokenizer
from verl.agent.environment import no_tools
from verl.config import Config
from verl.errors import (
    ConfigError,
)
from verl.trainer.run import prepare, read_prompts


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


@pytest.mark.parametrize("val_only", [True, False])
def test_questions_that_are_trained_and_validated_on_are_counted(
    val_only: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning with their number and one of them; none where nothing is trained."""
    for name, numbers in (("train", range(6)), ("val", range(4, 9))):
        rows = [{"data_source": "nq", "prompt": f"Question: who is {n}?",
                 "reward_model": {"ground_truth": "Ada"}} for n in numbers]  # fmt: skip
        (tmp_path / name).with_suffix(".jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = Config()
    config.data.train_files = [str(tmp_path / "train.jsonl")]
    config.data.val_files = [str(tmp_path / "val.jsonl")]
    config.do_search, config.trainer.val_only = False, val_only
    with caplog.at_level(logging.WARNING):
        train, val = read_prompts(config, no_tools(config), ByteTokenizer())
    assert (len(train), len(val)) == (6, 5)
    expected = "2 of 5 questions of data.val_files stand in data.train_files too, such as "
    found = [text for text in caplog.messages if text.startswith(expected)]
    assert len(found) == (0 if val_only else 1)
    assert all("val.jsonl#0 = train.jsonl#4" in text for text in found)
