"""`SearchR1Trainer`: a run in ten arguments, translated into `search_r1.Trainer`'s options."""

import copy
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from search_r1.datasets.question import (
    RecordLocation,
    make_rows,
    read_question,
    valid_questions,
    write_rows,
)
from search_r1.datasets.wording import PromptStyle, prompt_writer
from search_r1.trainer import History, Listener, OwnRetriever, Trainer
from verl.config import Config, cli
from verl.data.rows import read_records
from verl.errors import ConfigError, explain
from verl.model_files import num_positions

ALGORITHMS = {
    "ppo": ("ppo_trainer", "gae"),
    "grpo": ("grpo_trainer", "grpo"),
    "reinforce": ("ppo_trainer", "reinforce"),
}
"""The preset that a run starts from, and its estimator."""
COSTS = ("search_penalty", "invalid_format")
TAGS = 32
"""Tokens that a passage takes beside its text: its number, its title, the marks around it."""
UNKNOWN = ["data.train_files=later", "data.val_files=later"]


class SearchR1Trainer:
    """Trains a language model to search."""

    def __init__(
        self,
        model_name: str | Path,
        search_backend: str | OwnRetriever,
        rl_algorithm: str = "ppo",
        reward_config: Mapping[str, float] | None = None,
        max_search_turns: int = 2,
        devices: int | str | Sequence[int | str] | None = None,
        vllm_server: str | Sequence[str] | None = None,
        output_dir: str | Path | None = None,
        overrides: Sequence[str] = (),
    ) -> None:
        """Raises ConfigError for what cannot be meant.

        `search_backend`: a `DenseRetriever`, an address, or what `search_r1.Trainer` takes.
        `reward_config`: amounts that are added to a dialogue's score, so that a penalty is below 0;
        None is exact match. `devices`: how many, or which; None takes every GPU. `vllm_server`:
        addresses of vLLM servers that sample, and take each step's weights (docs/placement.md);
        None starts engines on the `devices`. `overrides`: `key=value` options, which win.
        """
        if str(rl_algorithm).lower() not in ALGORITHMS:
            expected = f"one of {', '.join(ALGORITHMS)}"
            fix = "name one; search_r1.Trainer has all estimators"
            raise ConfigError(explain("rl_algorithm", repr(rl_algorithm), expected, fix))
        preset, estimator = ALGORITHMS[rl_algorithm.lower()]
        words = ["--config-name", preset, "actor_rollout_ref.model.path=later", *UNKNOWN]
        config = cli.compose(words)
        config.algorithm.adv_estimator = estimator
        config.actor_rollout_ref.model.path = str(model_name)
        config.max_turns = max_search_turns
        label = f"{rl_algorithm.lower()}-{Path(model_name).name}"
        folder = Path(output_dir or f"runs/searchr1/{label}")
        config.trainer.default_local_dir, config.trainer.experiment_name = str(folder), label
        if reward_config is not None:
            config.reward_model.name = "em_cost"
            for name, size in scores_of(reward_config).items():
                setattr(config.reward_model, name, size)
        self._visible = place(config, devices)
        give_room(config, search_backend)
        if vllm_server is not None:
            given = vllm_server if isinstance(vllm_server, str) else list(vllm_server)
            config.actor_rollout_ref.rollout.url = given
        self.config = cli.resolve_config(config, overrides)
        self.search_backend = search_backend

    def train(
        self,
        train_data: str | Path,
        num_iterations: int,
        batch_size: int,
        val_data: str | Path | None = None,
        on_step: Listener | None = None,
    ) -> History:
        """Train on a jsonl file of `question` and `answer` (or `golden_answers`). Raises UserError.

        `num_iterations` steps of `batch_size` questions; without `val_data` nothing is validated.
        """
        config, folder = copy.deepcopy(self.config), Path(self.config.trainer.default_local_dir)
        config.data.train_files = rows_of(train_data, folder / "data" / "train.parquet")
        config.data.val_files = config.data.train_files
        if val_data is None:
            config.trainer.val_before_train, config.trainer.test_freq = False, 0
        else:
            config.data.val_files = rows_of(val_data, folder / "data" / "val.parquet")
        config.data.train_batch_size = batch_size
        config.trainer.total_training_steps = num_iterations
        trainer = Trainer(config, retriever=self.search_backend, on_step=on_step)
        if self._visible is not None:  # Ray and the ranks read it
            os.environ["CUDA_VISIBLE_DEVICES"] = self._visible
        return trainer.train()


def scores_of(amounts: Mapping[str, float]) -> dict[str, float]:
    """The options of `em_cost`. Raises ConfigError for a sign under which a mistake would pay."""
    found = {}
    for name, amount in amounts.items():
        is_cost = name in COSTS
        if not is_cost and name != "correct_answer":
            expected = f"one of correct_answer, {', '.join(COSTS)}"
            raise ConfigError(explain("reward_config", repr(name), expected, "correct the name"))
        is_number = isinstance(amount, int | float) and math.isfinite(amount)
        if not is_number or (amount > 0 if is_cost else amount <= 0):
            expected = f"{'0 or less' if is_cost else 'more than 0'}: it is added to the score"
            fix = f"{name}={-amount}" if is_number and amount else f"leave {name} out"
            raise ConfigError(explain(f"reward_config, {name}", repr(amount), expected, fix))
        found[name] = abs(float(amount))
    return found


def place(config: Config, devices: Any) -> str | None:
    """Set device and ranks; returns what CUDA_VISIBLE_DEVICES is to be, None to leave it."""
    if devices is None:
        devices = max(1, torch.cuda.device_count())
    if isinstance(devices, int) and not isinstance(devices, bool) and devices >= 1:
        config.trainer.n_gpus_per_node = devices
        return None
    given = [devices] if isinstance(devices, str) else devices
    listed = given if isinstance(given, list | tuple | range) else ()
    ids = [str(one).removeprefix("cuda").removeprefix(":") for one in listed]
    if ids and all(one == "cpu" for one in ids):
        config.trainer.device = "cpu"
    elif ids == [""]:  # cuda
        ids = ["0"]
    elif not ids or not all(one.isdigit() for one in ids) or len(set(ids)) < len(ids):
        expected = "a number of devices, a list such as [0, 1], cuda:0, or cpu"
        raise ConfigError(explain("devices", repr(devices), expected, "devices=1"))
    config.trainer.n_gpus_per_node = len(ids)
    return ",".join(ids) if torch.cuda.is_available() and ids[0] != "cpu" else None


def give_room(config: Config, backend: object) -> None:
    """Set the documents of a search, and the budgets for passages of `chunk_size` tokens."""
    data = config.data
    config.retriever.topk = getattr(backend, "top_k", config.retriever.topk)
    chunk = getattr(backend, "chunk_size", None)
    if chunk is None:
        return
    data.max_obs_length = config.retriever.topk * (chunk + TAGS)
    turn = data.max_obs_length + data.max_response_length
    wanted = max(data.max_prompt_length, data.max_start_length + config.max_turns * turn)
    try:
        most = num_positions(AutoConfig.from_pretrained(config.actor_rollout_ref.model.path))
    except (OSError, ValueError):  # the run tells what is wrong with its model
        most = None
    longest = wanted if most is None else min(wanted, most - data.max_response_length)
    data.max_prompt_length = longest


def rows_of(file: str | Path, out: Path) -> str:
    """A file of rows as the trainer reads it: the file itself, or one made of its questions."""
    records = list(read_records(str(file), ()))
    if any(
        isinstance(one, dict) and {"prompt", "reward_model"} <= one.keys() for _, one in records
    ):
        return str(file)
    source = Path(file).stem
    found = (
        read_question(one, RecordLocation(str(file), number, source, "")) for number, one in records
    )
    write_rows(make_rows(valid_questions(found), prompt_writer(PromptStyle.SEARCH), out.stem), out)
    return str(out)
