"""What is plugged into the core: for each seam, the modules that it asks, in their order.

Modules are named as text, and imported when a seam is first asked: one that was deleted is left out
(`verl.plugins.optional`), and the rest works. So this table is the only place that a new feature
changes, and the core names none. What an option chooses by name, such as an engine or a tracker, is
in the registry beside its protocol instead.
"""

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from verl.plugins import optional

RULES = ("verl.config.rules", "verl.ext.guard")
"""`problems(config)` yields what is wrong with options, as text."""
CHECKS = (
    "verl.preflight.questions", "verl.preflight.algorithms", "verl.rollout.vllm_build",
    "verl.ext.lora.choice", "verl.ext.replay", "verl.ext.nodes", "verl.preflight.machine",
    "verl.ext.cpu.cores", "verl.monitor.tracking",
)  # fmt: skip
"""`problems(config)` yields why the run cannot start here, as errors."""
PLANNERS = ("verl.ext.memory",)
"""`planned(config)` decides the options that are null until memory is estimated; returns them and
why the run does not fit this machine."""
PREPARERS = ("verl.ext.record", "verl.ext.teacher")
"""`prepare(config, tokenizer, step, total_steps)` is called before a run goes on after `step`."""
RECORDS = ("verl.ext.resume",)
"""`record(config, environment, tokenizer)` returns what checkpoints store of the run, by name, and
refuses to continue one of another."""
SUPPLIES = ("verl.ext.recorded",)
"""`supply(config, build_reward)` returns where trajectories come from if engines sample none, or
None; the first decides."""
SUPERVISORS = ("verl.ext.restart",)
"""`supervised(attempt)` returns what is called in the place of an attempt to run."""
STARTERS = ("verl.ext.overlapping", "verl.ext.reaper", "verl.ext.nodes", "verl.ext.cpu_env")
"""`add_to(start_up)` adds to what happens when a run's actors start."""
ENGINES = ("verl.ext.servers.choice", "verl.ext.lora.choice")
"""`choice(config)` returns the engines by other options than `rollout.name`, or None; the first
decides. `for_actors(config)` returns the options for the run's other processes, which must decide
as the driver does."""
STAT_LOGGERS = ("verl.ext.trace",)
"""`stat_loggers(config)` returns the loggers of vLLM's statistics, or None; the first decides."""
REPLICAS = ("verl.ext.replay", "verl.ext.gated", "verl.ext.turn_times")
"""`replica_class(config)` returns what hosts an engine, or None; the first decides."""
REPLICA_GROUPS = ("verl.ext.overlapping",)
"""`replicas_class(config)` returns the driver's side of the engines, or None; the first decides."""
ROLES = ("verl.ext.lora.choice",)
"""`roles_class(config)` returns what builds the models of a rank, or None; the first decides."""
RETRIES = ("verl.ext.retry",)
"""`retrying(rollouts, parts)` returns what samples in the place of the engines alone."""
SOURCES = ("verl.ext.recorded", "verl.ext.asynchrony")
"""`source(parts, measures)` returns the source of trajectories, or None; the first decides."""
MEASURES = ("verl.ext.guard", "verl.ext.turn_times")
"""`measure(trajectories)` returns metrics of a step's trajectories."""
HOOKS = (
    "verl.ext.critic_apart", "verl.ext.rank_calls", "verl.ext.speed", "verl.ext.turn_times",
    "verl.ext.staleness", "verl.ext.host_memory", "verl.ext.guard", "verl.trainer.validate",
    "verl.ext.reward_stages", "verl.ext.sibling", "verl.ext.teacher", "verl.ext.record",
    "verl.trainer.export", "verl.ext.lora", "verl.ext.canary", "verl.ext.retention",
    "verl.ext.early_end", "verl.trainer.checkpoints", "verl.ext.trace", "verl.ext.stopping",
    "verl.trainer.progress", "verl.ext.steady",
)  # fmt: skip
"""`hook(parts)` returns a hook of the run, or None. What adds metrics comes before what keeps the
step's state, and what ends a run after it."""


def plugged(seam: Sequence[str]) -> Iterator[ModuleType]:
    """Yield the modules of a seam that are there."""
    yield from filter(None, map(optional, seam))


def first(seam: Sequence[str], function: str, *arguments: Any) -> Any:
    """Return the first result of the seam's modules that is not None; None if there is none."""
    results = (getattr(module, function)(*arguments) for module in plugged(seam))
    return next((result for result in results if result is not None), None)
