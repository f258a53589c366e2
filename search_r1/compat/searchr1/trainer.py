"""`SearchR1Trainer`: a run in ten arguments, translated to the options of `search_r1.Trainer`."""

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
from search_r1.python_objects import RetrieverLike
from search_r1.trainer import Callback, History, Trainer
from verl.config import Config, cli
from verl.data.rows import read_records
from verl.errors import ConfigError, explain
from verl.model_files import num_positions

ALGORITHMS = {
    "ppo": ("ppo_trainer", "gae"),
    "grpo": ("grpo_trainer", "grpo"),
    "reinforce": ("ppo_trainer", "reinforce"),
}
"""The preset and the advantage estimator of each algorithm."""
COSTS = ("search_penalty", "invalid_format")
PASSAGE_OVERHEAD = 32
"""Tokens of a passage in addition to its text: number, title and tags."""
PLACEHOLDERS = ["data.train_files=later", "data.val_files=later"]
"""Required options that `train` sets."""


class SearchR1Trainer:
    """Trains a language model to search."""

    def __init__(
        self,
        model_name: str | Path,
        search_backend: str | RetrieverLike,
        rl_algorithm: str = "ppo",
        reward_config: Mapping[str, float] | None = None,
        max_search_turns: int = 2,
        devices: int | str | Sequence[int | str] | None = None,
        vllm_server: str | Sequence[str] | None = None,
        output_dir: str | Path | None = None,
        overrides: Sequence[str] = (),
    ) -> None:
        """Build and check the run's options. Raises ConfigError.

        `search_backend`: a `DenseRetriever`, an address, or any retriever of `search_r1.Trainer`.
        `reward_config`: amounts that are added to the score, so penalties are negative; None is
        exact match. `devices`: their number, or which; None uses all GPUs. `vllm_server`: addresses
        of vLLM servers that sample and receive each step's weights (docs/guides/rollouts.md);
        None starts engines on the `devices`. `overrides`: `key=value` options, which come first.
        """
        if str(rl_algorithm).lower() not in ALGORITHMS:
            expected = f"one of {', '.join(ALGORITHMS)}"
            fix = "name one; search_r1.Trainer has all estimators"
            raise ConfigError(explain("rl_algorithm", repr(rl_algorithm), expected, fix))
        preset, estimator = ALGORITHMS[rl_algorithm.lower()]
        words = ["--config-name", preset, "actor_rollout_ref.model.path=later", *PLACEHOLDERS]
        config = cli.compose(words)
        config.algorithm.adv_estimator = estimator
        config.actor_rollout_ref.model.path = str(model_name)
        config.max_turns = max_search_turns
        label = f"{rl_algorithm.lower()}-{Path(model_name).name}"
        folder = Path(output_dir or f"runs/searchr1/{label}")
        config.trainer.default_local_dir, config.trainer.experiment_name = str(folder), label
        if reward_config is not None:
            config.reward_model.name = "em_cost"
            config.reward_model.scores = cost_options(reward_config)
        self._visible_devices = set_devices(config, devices)
        set_search_budgets(config, search_backend)
        if vllm_server is not None:
            servers = vllm_server if isinstance(vllm_server, str) else list(vllm_server)
            config.actor_rollout_ref.rollout.url = servers
        self.config = cli.resolve_config(config, overrides)
        self.search_backend = search_backend

    def train(
        self,
        train_data: str | Path,
        num_iterations: int,
        batch_size: int,
        val_data: str | Path | None = None,
        on_step: Callback | None = None,
    ) -> History:
        """Train on a jsonl file of `question` and `answer` (or `golden_answers`). Raises UserError.

        Runs `num_iterations` steps of `batch_size` questions; validates only with `val_data`.
        """
        config, folder = copy.deepcopy(self.config), Path(self.config.trainer.default_local_dir)
        config.data.train_files = prepare_rows(train_data, folder / "data" / "train.parquet")
        config.data.val_files = config.data.train_files
        if val_data is None:
            config.trainer.val_before_train, config.trainer.test_freq = False, 0
        else:
            config.data.val_files = prepare_rows(val_data, folder / "data" / "val.parquet")
        config.data.train_batch_size = batch_size
        config.trainer.total_training_steps = num_iterations
        trainer = Trainer(config, retriever=self.search_backend, on_step=on_step)
        if self._visible_devices is not None:  # read by Ray and the ranks
            os.environ["CUDA_VISIBLE_DEVICES"] = self._visible_devices
        return trainer.train()


def cost_options(amounts: Mapping[str, float]) -> dict[str, float]:
    """Convert signed amounts to the options of `em_cost`. Raises ConfigError for a wrong sign."""
    options = {}
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
        options[name] = abs(float(amount))
    return options


def set_devices(config: Config, devices: Any) -> str | None:
    """Set device and number of ranks; return CUDA_VISIBLE_DEVICES, or None to leave it as it is."""
    if devices is None:
        devices = max(1, torch.cuda.device_count())
    if isinstance(devices, int) and not isinstance(devices, bool) and devices >= 1:
        config.trainer.n_gpus_per_node = devices
        return None
    names = [devices] if isinstance(devices, str) else devices
    if not isinstance(names, list | tuple | range):
        names = ()
    ids = [str(name).removeprefix("cuda").removeprefix(":") for name in names]
    if ids and all(id == "cpu" for id in ids):
        config.trainer.device = "cpu"
    elif ids == [""]:  # "cuda" without a number
        ids = ["0"]
    elif not ids or not all(id.isdigit() for id in ids) or len(set(ids)) < len(ids):
        expected = "a number of devices, a list such as [0, 1], cuda:0, or cpu"
        raise ConfigError(explain("devices", repr(devices), expected, "devices=1"))
    config.trainer.n_gpus_per_node = len(ids)
    return ",".join(ids) if torch.cuda.is_available() and ids[0] != "cpu" else None


def set_search_budgets(config: Config, backend: object) -> None:
    """Set topk, and the token budgets for passages of the backend's `chunk_size`, if it has one."""
    data = config.data
    config.retriever.topk = getattr(backend, "top_k", config.retriever.topk)
    chunk = getattr(backend, "chunk_size", None)
    if chunk is None:
        return
    data.max_obs_length = config.retriever.topk * (chunk + PASSAGE_OVERHEAD)
    turn = data.max_obs_length + data.max_response_length
    length = max(data.max_prompt_length, data.max_start_length + config.max_turns * turn)
    try:
        context = num_positions(AutoConfig.from_pretrained(config.actor_rollout_ref.model.path))
    except (OSError, ValueError):  # the run itself reports what is wrong with its model
        context = None
    if context is not None:
        length = min(length, context - data.max_response_length)
    data.max_prompt_length = length


def prepare_rows(file: str | Path, out: Path) -> str:
    """Return a file of rows for the trainer: `file` itself, or `out`, written from questions."""
    records = list(read_records(str(file), ()))
    columns = {"prompt", "reward_model"}
    if any(isinstance(record, dict) and columns <= record.keys() for _, record in records):
        return str(file)
    source = Path(file).stem
    questions = (
        read_question(record, RecordLocation(str(file), number, source, ""))
        for number, record in records
    )
    rows = make_rows(valid_questions(questions), prompt_writer(PromptStyle.SEARCH), out.stem)
    write_rows(rows, out)
    return str(out)
