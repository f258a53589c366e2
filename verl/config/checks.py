"""Rules between options, checked before any work: each is one row that names got, expected, fix.

What needs the machine (files, devices, the retriever) is in `verl.preflight.checks`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from verl.config import Config
from verl.config.algorithm_checks import algorithm_problems
from verl.config.reward_checks import reward_problems
from verl.core_algos.advantages import ADVANTAGES
from verl.core_algos.kl import KL_KINDS
from verl.core_algos.losses import AGGREGATIONS
from verl.core_algos.mismatch import LEVELS
from verl.core_algos.policy_losses import POLICY_LOSSES
from verl.errors import ConfigError, explain
from verl.monitor.tracking import BACKENDS, backend_names
from verl.rollout.vllm_engine import VLLM_LORA_RANKS
from verl.training.devices import DTYPES

Problem = tuple[str, object, str, str]
"""Subject, got, expected, fix."""


def check(config: Config) -> None:
    """Refuse settings that cannot work; the error lists every one found."""
    rules = (
        _choices,
        _ranges,
        _budgets,
        _batches,
        _engines,
        algorithm_problems,
        _saving,
        _guard,
        _retrieval,
        reward_problems,
        _adapters,
        _restarts,
    )
    problems = [explain(*problem) for rule in rules for problem in rule(config)]
    if problems:
        raise ConfigError("\n".join(problems))


def _choices(config: Config) -> Iterator[Problem]:
    """Options that take one of a few words."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    words: list[tuple[str, Any, tuple[str, ...]]] = [
        ("algorithm.adv_estimator", config.algorithm.adv_estimator, tuple(ADVANTAGES)),
        ("algorithm.kl_penalty", config.algorithm.kl_penalty, KL_KINDS),
        ("algorithm.kl_ctrl.type", config.algorithm.kl_ctrl.type, ("fixed", "adaptive")),
        ("actor_rollout_ref.actor.kl_loss_type", actor.kl_loss_type, KL_KINDS),
        ("actor_rollout_ref.actor.loss_agg_mode", actor.loss_agg_mode, AGGREGATIONS),
        ("actor_rollout_ref.actor.policy_loss", actor.policy_loss, tuple(POLICY_LOSSES)),
        ("actor_rollout_ref.actor.llds_gate", actor.llds_gate, ("turn", "trajectory")),
        ("actor_rollout_ref.actor.rollout_is", actor.rollout_is, LEVELS),
        ("actor_rollout_ref.rollout.name", rollout.name, ("vllm",)),
        ("actor_rollout_ref.rollout.dtype", rollout.dtype, ("auto", *DTYPES)),
        ("trainer.device", config.trainer.device, ("auto", "cuda", "cpu")),
        ("trainer.memory_preflight", config.trainer.memory_preflight, ("refuse", "warn", "off")),
        ("trainer.guard.action", config.trainer.guard.action, ("warn", "stop", "rollback")),
        ("trainer.compute_dtype", config.trainer.compute_dtype, ("auto", *DTYPES)),
    ]
    words += [("trainer.logger", n, BACKENDS) for n in backend_names(config.trainer.logger)]
    for key, got, allowed in words:
        if got not in allowed:
            yield key, got, f"one of {', '.join(allowed)}", f"{key}={allowed[0]}"


def _ranges(config: Config) -> Iterator[Problem]:
    """Numbers with a bound of their own."""
    data, actor = config.data, config.actor_rollout_ref.actor
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    at_least_one = {
        "data.train_batch_size": data.train_batch_size,
        "algorithm.filter_groups.max_num_gen_batches": (
            config.algorithm.filter_groups.max_num_gen_batches
        ),
        "data.val_batch_size": data.val_batch_size,
        "data.train_data_num": data.train_data_num,
        "data.val_data_num": data.val_data_num,
        "data.max_prompt_length": data.max_prompt_length,
        "data.max_response_length": data.max_response_length,
        "data.max_start_length": data.max_start_length,
        "data.max_obs_length": data.max_obs_length,
        "actor_rollout_ref.actor.ppo_mini_batch_size": actor.ppo_mini_batch_size,
        "actor_rollout_ref.actor.ppo_micro_batch_size": actor.ppo_micro_batch_size,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": actor.ppo_max_token_len_per_gpu,
        "actor_rollout_ref.actor.ppo_epochs": actor.ppo_epochs,
        "actor_rollout_ref.rollout.n_agent": rollout.n_agent,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": rollout.tensor_model_parallel_size,
        "actor_rollout_ref.rollout.num_replicas": rollout.num_replicas,
        "actor_rollout_ref.rollout.max_num_seqs": rollout.max_num_seqs,
        "critic.ppo_micro_batch_size": config.critic.ppo_micro_batch_size,
        "critic.ppo_mini_batch_size": config.critic.ppo_mini_batch_size,
        "critic.ppo_epochs": config.critic.ppo_epochs,
        "trainer.n_gpus_per_node": trainer.n_gpus_per_node,
        "trainer.nnodes": trainer.nnodes,
        "trainer.total_epochs": trainer.total_epochs,
        "trainer.total_training_steps": trainer.total_training_steps,
    }
    for key, got in at_least_one.items():
        if got is not None and got < 1:
            yield key, got, "1 or more", f"{key}=1 or more, or leave it out"
    for key, got in {"save_freq": trainer.save_freq, "test_freq": trainer.test_freq}.items():
        if got < -1:
            yield f"trainer.{key}", got, "a number of steps, 0 or -1", f"trainer.{key}=-1"
    if config.max_turns < 0:
        yield "max_turns", config.max_turns, "0 or more searches", "max_turns=2"
    yield from _shares(config)


def _shares(config: Config) -> Iterator[Problem]:
    """Numbers between bounds that are not counts."""
    rollout, algorithm = config.actor_rollout_ref.rollout, config.algorithm
    actor = config.actor_rollout_ref.actor
    unit = {
        "algorithm.gamma": (algorithm.gamma, True),
        "algorithm.lam": (algorithm.lam, True),
        "actor_rollout_ref.rollout.top_p": (rollout.top_p, False),
        "actor_rollout_ref.rollout.gpu_memory_utilization": (
            rollout.gpu_memory_utilization,
            False,
        ),
        "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": (
            actor.optim.lr_warmup_steps_ratio,
            True,
        ),
        "critic.optim.lr_warmup_steps_ratio": (config.critic.optim.lr_warmup_steps_ratio, True),
        "trainer.memory_low": (config.trainer.memory_low, True),
    }
    for key, (got, zero_allowed) in unit.items():
        if not 0 <= got <= 1 or (got == 0 and not zero_allowed):
            bounds = "from 0 to 1" if zero_allowed else "above 0, at most 1"
            yield key, got, f"a number {bounds}", f"{key}=1.0"
    rates = {
        "actor_rollout_ref.actor.optim.lr": actor.optim.lr,
        "critic.optim.lr": config.critic.optim.lr,
        "actor_rollout_ref.actor.kl_loss_coef": actor.kl_loss_coef,
        "algorithm.kl_ctrl.kl_coef": algorithm.kl_ctrl.kl_coef,
    }
    for key, got in rates.items():
        if got < 0:
            yield key, got, "0 or more", f"{key}=1e-6"
    if rollout.temperature <= 0 and not config.trainer.val_only:
        key = "actor_rollout_ref.rollout.temperature"
        fix = f"{key}=1.0 (validation has its own: rollout.val_kwargs.temperature)"
        yield key, rollout.temperature, "more than 0: training needs samples that differ", fix


def _budgets(config: Config) -> Iterator[Problem]:
    """The context must hold the first prompt, and one more turn if a search is to be answered."""
    data = config.data
    if data.max_start_length > data.max_prompt_length:
        got = f"{data.max_start_length}, more than data.max_prompt_length={data.max_prompt_length}"
        fix = "raise data.max_prompt_length or lower data.max_start_length"
        yield "data.max_start_length", got, "a prompt that fits the context", fix
    if config.do_search and config.max_turns and data.max_obs_length >= data.max_prompt_length:
        got = f"{data.max_obs_length}, not less than max_prompt_length={data.max_prompt_length}"
        fix = "raise data.max_prompt_length or lower data.max_obs_length"
        yield "data.max_obs_length", got, "room for the prompt beside one observation", fix


def _batches(config: Config) -> Iterator[Problem]:
    """Every rank must have something to do in every update."""
    size, ranks = config.actor_rollout_ref.actor.ppo_mini_batch_size, config.num_ranks
    if size < ranks and not config.trainer.val_only:
        key = "actor_rollout_ref.actor.ppo_mini_batch_size"
        expected = f"one trajectory or more for each of {ranks} ranks"
        yield key, size, expected, f"{key}={ranks}, or fewer trainer.n_gpus_per_node"


def _engines(config: Config) -> Iterator[Problem]:
    """Engines must divide the devices of a node, and nodes may be waited for."""
    per_node = config.trainer.n_gpus_per_node
    size = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    if size > 0 and per_node % size:
        key = "actor_rollout_ref.rollout.tensor_model_parallel_size"
        yield key, size, f"a divisor of trainer.n_gpus_per_node={per_node}", f"{key}=1"
    if config.trainer.node_timeout < 0:
        key = "trainer.node_timeout"
        yield key, config.trainer.node_timeout, "0 or more seconds", f"{key}=600"


def _adapters(config: Config) -> Iterator[Problem]:
    """Adapters that vLLM has room for, and that act on something."""
    sections = {"actor_rollout_ref.model": config.actor_rollout_ref.model}
    sections["critic.model"] = config.critic.model
    for section, options in sections.items():
        key = f"{section}.lora_rank"
        if not 0 <= options.lora_rank <= VLLM_LORA_RANKS[-1]:
            expected = f"0 (all weights are trained) to {VLLM_LORA_RANKS[-1]}"
            yield key, options.lora_rank, expected, f"{key}=32"
        estimator = ADVANTAGES.get(config.algorithm.adv_estimator)
        has_critic = estimator is None or estimator.needs_critic
        if section == "critic.model" and options.has_adapter and not has_critic:
            expected = f"0: {config.algorithm.adv_estimator} has no critic"
            yield key, options.lora_rank, expected, f"{key}=0"
        if options.has_adapter and options.lora_alpha <= 0:
            key = f"{section}.lora_alpha"
            yield key, options.lora_alpha, "more than 0", f"{key}={2 * options.lora_rank}"


def _saving(config: Config) -> Iterator[Problem]:
    """Times that can pass, and counts of checkpoints."""
    trainer = config.trainer
    for name in ("save_minutes", "time_limit"):
        got = getattr(trainer, name)
        if got is not None and not got > 0:
            yield f"trainer.{name}", got, "more than 0 minutes, or null", f"trainer.{name}=null"
    if trainer.keep_last is not None and trainer.keep_last < 1:
        fix = "trainer.keep_last=1, or null to keep all"
        yield "trainer.keep_last", trainer.keep_last, "1 checkpoint or more", fix
    if trainer.keep_best < 0:
        yield "trainer.keep_best", trainer.keep_best, "0 or more checkpoints", "trainer.keep_best=1"
    if not trainer.best_metric.startswith("val/"):
        key = "trainer.best_metric"
        yield key, trainer.best_metric, "a metric of validation, val/…", f"{key}=val/score"


def _guard(config: Config) -> Iterator[Problem]:
    """A guard that can judge, and checkpoints to go back to."""
    guard, trainer = config.trainer.guard, config.trainer
    counts = ("patience", "baseline_steps", "max_rollbacks")
    for name in (*counts, "drift_trajectories"):
        got, least = getattr(guard, name), int(name in counts)
        if got < least:
            key = f"trainer.guard.{name}"
            yield key, got, f"{least} or more", f"{key}={least}, or leave it out"
    if not 0 < guard.rollback_lr_factor <= 1:
        key = "trainer.guard.rollback_lr_factor"
        yield key, guard.rollback_lr_factor, "a number above 0, at most 1", f"{key}=0.3"
    for option in fields(guard):
        got = getattr(guard, option.name)
        if option.type == "float | None" and got is not None and got < 0:
            key = f"trainer.guard.{option.name}"
            yield key, got, "0 or more, or null for no such rule", f"{key}=null"
    if guard.enable and guard.action == "rollback" and trainer.save_freq < 1:
        expected = "1 or more: a rollback needs checkpoints to go back to"
        fix = "trainer.save_freq=10, or trainer.guard.action=stop"
        yield "trainer.save_freq", trainer.save_freq, expected, fix


def _restarts(config: Config) -> Iterator[Problem]:
    """How patient a run is with processes that die or hang."""
    trainer = config.trainer
    if trainer.max_restarts < 0:
        key = "trainer.max_restarts"
        yield key, trainer.max_restarts, "0 or more restarts", f"{key}=3"
    if trainer.hang_timeout is not None and trainer.hang_timeout <= 0:
        key = "trainer.hang_timeout"
        yield key, trainer.hang_timeout, "more than 0 seconds, or null", f"{key}=600"


def _retrieval(config: Config) -> Iterator[Problem]:
    """Where and how much to search."""
    if not config.do_search:
        return
    url = config.retriever.url
    addresses = [] if url == "empty" else url.split(",")
    if not all(one.strip().startswith(("http://", "https://")) for one in addresses):
        example = "retriever.url=http://127.0.0.1:8000/retrieve"
        expected = "http addresses of /retrieve with commas between them, or empty"
        yield "retriever.url", repr(url), expected, example
    if config.retriever.topk < 1:
        yield "retriever.topk", config.retriever.topk, "1 or more documents", "retriever.topk=3"
    if config.retriever.timeout <= 0:
        fix = "retriever.timeout=60"
        yield "retriever.timeout", config.retriever.timeout, "more than 0 seconds", fix
    if config.retriever.deadline is not None and config.retriever.deadline <= 0:
        fix = "retriever.deadline=null"
        yield "retriever.deadline", config.retriever.deadline, "more than 0 seconds, or null", fix
    if not config.retriever.max_outage >= 0:
        fix = "retriever.max_outage=1800"
        yield "retriever.max_outage", config.retriever.max_outage, "0 seconds or more", fix
