"""Checks before a run; restarts after a lost rank: from the right checkpoint, not for ever."""

import json
import logging
from pathlib import Path

import pytest

from tests.bad_models import whole_model
from tests.checkpoints import writing
from tests.datasets.collection import write_jsonl
from tests.fakes import ByteTokenizer
from verl.agent.environment import Environment, no_tools
from verl.checkpoint import folders
from verl.config import Config
from verl.data.sampler import PromptSampler
from verl.errors import ConfigError, ModelError, UserError
from verl.model_files import load_tokenizer
from verl.rewards.interface import EachAlone, Reward
from verl.trainer.run import Sampled, prepare, read_prompts

NUM_STEPS = 45
"""Batches of 3 in 15 epochs of 9 rows."""


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


def read(config: Config) -> int:
    """Read what a run samples, before anything starts; return its number of steps."""
    tokenizer = load_tokenizer(config.actor_rollout_ref.model.path)
    reward = EachAlone(lambda t: Reward(0.0))
    return Sampled(config).read(Environment(), tokenizer, reward, 0)[1]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A run over ten rows, of which nine have a prompt that is short enough."""
    config = Config()
    texts = ["Who?"] * 9 + ["Who? " * 40]
    rows = [
        {"prompt": text, "data_source": "nq", "weight": i % 2,
         "reward_model": {"ground_truth": {"target": ["a"]}}}
        for i, text in enumerate(texts)
    ]  # fmt: skip
    config.data.train_files = config.data.val_files = str(
        write_jsonl(tmp_path / "rows.jsonl", rows)
    )
    config.data.max_start_length, config.data.train_batch_size = 90, 3
    config.actor_rollout_ref.model.path = str(whole_model(tmp_path / "model"))
    config.trainer.default_local_dir, config.trainer.resume_mode = str(tmp_path / "run"), "auto"
    return config


def resumed(config: Config, num_rows: int, **change: object) -> None:
    """Write a checkpoint of a run over that many rows."""
    sampler = PromptSampler(num_rows, config.data.train_batch_size)
    sampler.next_batch()
    state = {"step": 1, "kl_coef": 0.0, "sampler": {**sampler.state_dict(), **change}}
    with writing(Path(config.trainer.default_local_dir), 1) as folder:
        folders.write_state(folder, state)


def test_an_order_of_the_rows_that_cannot_be_is_found_before_anything_starts(
    config: Config,
) -> None:
    """Too few rows are left for a batch, or too few with a weight."""
    assert read(config) == NUM_STEPS
    config.data.train_batch_size = 10
    with pytest.raises(ConfigError, match=r"train_batch_size: got 10, expected at most the 9 rows"):
        read(config)
    config.trainer.val_only = True  # which draws no batch
    read(config)
    config.trainer.val_only = False
    config.data.train_batch_size, config.data.weight_column = 5, "weight"
    with pytest.raises(UserError, match="got 4 rows with a weight above 0"):
        read(config)


def test_a_position_that_cannot_be_resumed_is_found_before_anything_starts(config: Config) -> None:
    """Unless its rows are the same ones, or other data is accepted by name."""
    resumed(config, num_rows=9)
    assert read(config) == NUM_STEPS
    resumed(config, num_rows=10)
    with pytest.raises(ConfigError, match=r"got 9 num_rows, expected 10; .*resume_anyway=\[data\]"):
        read(config)
    config.trainer.resume_anyway = ["data"]
    assert read(config) == NUM_STEPS
    resumed(config, num_rows=9, epoch="x")
    with pytest.raises(ModelError, match=r"trainer_state\.json"):
        read(config)
