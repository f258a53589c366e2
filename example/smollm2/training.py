"""The stages that make data, dialogues and adapters."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import AutoTokenizer

from example.smollm2 import adapters
from example.smollm2.dialogues import Dialogue, make_dialogues
from example.smollm2.recipe import ROOT, Recipe
from example.smollm2.settings import MODEL_FOLDER
from example.smollm2.shipped import made_base
from scripts.processes import run
from search_r1.agent.generation import search_agent
from search_r1.agent.tags import TEMPLATES
from search_r1.search.client import RetrievalClient
from verl.agent.dialogue import Limits
from verl.checkpoint import HEALTHY, STEP_NAME
from verl.data.rows import load_rows
from verl.errors import CollapseError, DataError, explain
from verl.sft.demonstrations import load_demonstrations

logger = logging.getLogger(__name__)

UNLIMITED = 1 << 30


def prepare_data(recipe: Recipe) -> None:
    """Rows, a copy of the corpus (beside which its offsets are kept), its index, and the base."""
    settings = recipe.settings
    source = settings.data_dir.resolve()
    recipe.python(
        "scripts/data_process/own_questions.py", str(source / "train.jsonl"),
        str(source / "dev.jsonl"), "--local_dir", str(recipe.data),
        "--template_type", settings.template,
    )  # fmt: skip
    shutil.copyfile(source / "corpus.jsonl", recipe.data / "corpus.jsonl")
    recipe.python(
        "-m", "search_r1.search.index_builder", "--retrieval_method", "bm25",
        "--corpus_path", str(recipe.data / "corpus.jsonl"), "--save_dir", str(recipe.index),
    )  # fmt: skip
    made_base(recipe.base)


def write_dialogues(recipe: Recipe) -> None:
    """Dialogues of the cold start, the training rows that they solve, and a report on both."""
    rows = load_rows(str(recipe.data / "train.parquet"))
    tokenizer = AutoTokenizer.from_pretrained(recipe.base)
    with recipe.retriever() as url:
        made = asyncio.run(_ask(recipe, url, tokenizer, rows))
    if not made:
        fix = "give questions whose answers the corpus holds"
        raise DataError(explain("dialogues", "none", "a question with a hit", fix))
    file = recipe.data / "dialogues.jsonl"
    file.write_text(
        "".join(json.dumps(d.record(), ensure_ascii=False) + "\n" for d in made), encoding="utf-8"
    )
    solved = [dialogue.row.number for dialogue in made]
    pd.read_parquet(recipe.data / "train.parquet").iloc[solved].to_parquet(
        recipe.data / "answerable.parquet", index=False
    )
    found = report(len(rows), made, file, tokenizer)
    (recipe.data / "dialogues.json").write_text(json.dumps(found, indent=1) + "\n")
    recipe.console.print(found)


async def _ask(recipe: Recipe, url: str, tokenizer: Any, rows: Sequence[Any]) -> list[Dialogue]:
    """The dialogues, by an agent with the budgets of training."""
    settings = recipe.settings
    limits = Limits(max_turns=settings.max_turns, max_obs_length=settings.max_obs_length)
    async with RetrievalClient(url, settings.topk) as retrieval:
        agent = search_agent(retrieval, tokenizer, limits, TEMPLATES[settings.template])
        return await make_dialogues(rows, agent, settings.seed)


def report(num_rows: int, made: Sequence[Dialogue], file: Path, tokenizer: Any) -> dict[str, Any]:
    """How many questions had a dialogue, and how long these are in tokens."""
    trajectories = load_demonstrations(str(file), tokenizer, UNLIMITED)
    lengths = [trajectory.num_tokens for trajectory in trajectories]
    written = [trajectory.num_policy_tokens for trajectory in trajectories]
    return {
        "questions": num_rows,
        "dialogues": len(made),
        "by_set": dict(sorted(Counter(d.row.data_source for d in made).items())),
        "by_searches": dict(sorted(Counter(len(d.searches) for d in made).items())),
        "tokens": _spread(lengths),
        "policy_tokens": _spread(written),
    }


def _spread(values: Sequence[int]) -> dict[str, float]:
    names = {"median": 50, "p90": 90, "max": 100}
    spread = {name: float(np.percentile(values, at)) for name, at in names.items()}
    return {"mean": round(float(np.mean(values)), 1), **spread}


def fine_tune(recipe: Recipe) -> None:
    """The first adapter, and the base with it merged in float32, which GRPO starts from."""
    recipe.python("-m", "verl.sft.trainer", *sft_options(recipe))


def sft_options(recipe: Recipe) -> list[str]:
    """What python -m verl.sft.trainer is told."""
    settings = recipe.settings
    return [
        f"model_path={recipe.base}",
        f"train_file={recipe.data / 'dialogues.jsonl'}",
        f"output_dir={recipe.out / 'sft'}",
        f"steps={settings.sft_steps}",
        f"batch_size={settings.sft_batch_size}",
        f"lr={settings.sft_lr}",
        "schedule=cosine",
        f"max_length={settings.max_length}",
        f"max_tokens_per_micro_batch={settings.micro_batch_tokens}",
        f"lora_rank={settings.sft_rank}",
        f"lora_alpha={2 * settings.sft_rank}",
        f"device={settings.device}",
        f"seed={settings.seed}",
        "save_dtype=float32",
    ]


def reinforce(recipe: Recipe) -> None:
    """GRPO of a second adapter over the merged first; a killed run goes on from its checkpoint.

    Where the collapse guard ends the run, the last checkpoint that it trusts is taken.
    """
    with recipe.retriever() as url:
        environment = recipe.environment(
            BASE_MODEL=str(recipe.out / "sft"), RETRIEVER_URL=url, N_GPUS="1"
        )
        command = ["bash", "train_grpo.sh", *rl_options(recipe)]
        try:
            run(command, ROOT, environment)
        except subprocess.CalledProcessError as error:
            if error.returncode != CollapseError.exit_code:
                raise
            export_healthy(recipe)


def rl_options(recipe: Recipe) -> list[str]:
    """What train_grpo.sh is told."""
    settings = recipe.settings
    num_dialogues = settings.rl_prompts * settings.rl_group
    return [
        f"data.train_files={recipe.data / 'answerable.parquet'}",
        f"data.val_files={recipe.dev}",
        f"data.val_data_num={settings.rl_val_rows}",
        f"data.train_batch_size={settings.rl_prompts}",
        f"data.max_start_length={settings.max_start_length}",
        f"data.max_prompt_length={settings.max_prompt_length}",
        f"data.max_response_length={settings.max_response_length}",
        f"data.max_obs_length={settings.max_obs_length}",
        f"template={settings.template}",
        f"max_turns={settings.max_turns}",
        f"retriever.topk={settings.topk}",
        f"reward_model.name={settings.rl_reward}",
        f"actor_rollout_ref.model.lora_rank={settings.rl_rank}",
        f"actor_rollout_ref.model.lora_alpha={2 * settings.rl_rank}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        f"actor_rollout_ref.actor.optim.lr={settings.rl_lr}",
        "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.05",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={num_dialogues}",
        "actor_rollout_ref.actor.ppo_micro_batch_size=null",
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={settings.micro_batch_tokens}",
        "actor_rollout_ref.actor.use_kl_loss=false",
        "algorithm.kl_ctrl.kl_coef=0",
        f"actor_rollout_ref.rollout.n_agent={settings.rl_group}",
        f"actor_rollout_ref.rollout.max_num_seqs={max(64, num_dialogues)}",
        f"trainer.default_local_dir={recipe.out / 'rl'}",
        "trainer.experiment_name=smollm2",
        "trainer.logger=[console,jsonl]",
        f"trainer.device={settings.device}",
        f"trainer.total_training_steps={settings.rl_steps}",
        f"trainer.save_freq={settings.rl_save_freq}",
        f"trainer.test_freq={settings.rl_save_freq}",
        "trainer.resume_mode=auto",
        "trainer.guard.action=rollback",
        f"trainer.seed={settings.seed}",
    ]


def export_healthy(recipe: Recipe) -> None:
    """Write the adapter of the newest checkpoint that the guard trusts. Raises DataError."""
    folders = [f.parent for f in (recipe.out / "rl").glob(f"global_step_*/{HEALTHY}")]
    steps = {int(found[1]): f for f in folders if (found := STEP_NAME.fullmatch(f.name))}
    if not steps:
        fix = "lower rl_lr in example/smollm2/settings.py"
        raise DataError(explain("GRPO", "a collapse at once", "a healthy checkpoint", fix))
    logger.warning("GRPO collapsed: the recipe goes on with step %d", max(steps))
    recipe.python(
        "-m", "verl.checkpoint", "export", str(steps[max(steps)]),
        "--out", str(recipe.out / "rl" / "adapter"), "--adapter",
    )  # fmt: skip


def write_adapters(recipe: Recipe) -> None:
    """Both adapters over the original base, in bfloat16, as they are evaluated and shipped."""
    first = adapters.Factors.read(recipe.out / "sft" / "adapter")
    second = adapters.Factors.read(recipe.out / "rl" / "adapter")
    found = {"sft": first, "rl": adapters.combine(first, second)}
    for name, adapter in found.items():
        folder = recipe.out / "adapters" / name
        adapters.write(
            adapter, folder, MODEL_FOLDER.as_posix(), recipe.dialogue, torch.bfloat16
        )  # fmt: skip
        recipe.console.print(f"{folder}: rank {adapter.rank}")
