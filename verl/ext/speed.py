"""FLOPs of the ranks, computed on the driver from the sequences it sends and the models' shapes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from verl.batch import TokenBatch
from verl.config import Config
from verl.ext.flops import ModelFlops, model_flops, peak_flops
from verl.monitor.performance import CRITIC_PHASES
from verl.packing import Packing, as_rows
from verl.trainer.hooks import Hook
from verl.training.budgets import TokenBudgets, actor_budgets, critic_budgets
from verl.training.devices import card_name, compute_dtype
from verl.training.models import LOGITS_PER_CHUNK
from verl.types import Metrics

if TYPE_CHECKING:
    from verl.trainer.build import Parts
    from verl.trainer.loop import RayPPOTrainer


class Speed(Hook):
    """Adds the ranks' FLOP/s and, on a known card, their utilisation to a step's metrics."""

    def __init__(self, work: WorkCounter, card: str, dtype: str) -> None:
        """`work` counts the learner's passes, on ranks with that `card` (empty on CPU)."""
        self.work, self.peak = work, peak_flops(card, dtype)

    def on_start(self, trainer: RayPPOTrainer) -> None:
        """Have the learner report its passes."""
        trainer.learner.count_pass = self.work

    def on_trained(self, trainer: RayPPOTrainer, metrics: Metrics) -> None:
        """Add the metrics of the passes since the last step."""
        timings, config = trainer.current.timings, trainer.config
        seconds = timings.seconds | timings.concurrent
        num_ranks = (config.placement.actor.num_ranks, config.placement.critic.num_ranks)
        metrics |= speed_metrics(self.work.take(), seconds, num_ranks, self.peak)
        if trainer.rollouts is not None:
            metrics |= trainer.rollouts.sent


def hook(parts: Parts) -> Speed:
    """Return the hook of a run."""
    return Speed(WorkCounter(parts.config), parts.on_rank(card_name), parts.on_rank(compute_dtype))


@dataclass(frozen=True)
class Work:
    """Numbers of FLOPs."""

    model: float = 0.0
    """FLOPs that the computation requires."""
    recomputed: float = 0.0
    """FLOPs of what was computed a second time to save memory."""

    def __add__(self, other: Work) -> Work:
        return Work(self.model + other.model, self.recomputed + other.recomputed)


class WorkCounter:
    """Counts the FLOPs of the ranks by phase; models of unknown shape are not counted.

    Copies of a prompt that ranks do not compute, since a group shares one copy, are not counted.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        section, critic = config.actor_rollout_ref, config.critic
        self.policy = model_flops(section.model, section.model.path, is_critic=False)
        self.critic = model_flops(critic.model, config.critic_path, is_critic=True)
        self.reference = self.policy and replace(self.policy, adapter=0)
        self._done: dict[str, Work] = defaultdict(Work)

    def __call__(self, phase: str, model: str, batch: TokenBatch) -> None:
        """Count a pass of `policy`, `reference` or `critic`; see `verl.trainer.learn.Counter`."""
        flops: ModelFlops | None = getattr(self, model)
        add = self.add_update if phase.startswith("update") else self.add_forward
        add(phase, flops, batch)

    def add_forward(self, phase: str, model: ModelFlops | None, batch: TokenBatch) -> None:
        """Count a forward pass of `model` over the batch."""
        if model is not None:
            skipped = self._skipped_prompts(model, batch, self._budgets(model).inference)
            flops = model.forward(*sizes(model, batch)) - model.forward(skipped, 0)
            self._done[phase] += Work(flops)

    def add_update(self, phase: str, model: ModelFlops | None, mini_batch: TokenBatch) -> None:
        """Count a forward and backward pass of `model` over the mini-batch."""
        if model is not None:
            lengths, num_targets = sizes(model, mini_batch)
            kept = num_targets if model.is_critic else LOGITS_PER_CHUNK // model.shape.vocab
            recomputed = model.recomputed(lengths, max(num_targets - kept, 0))
            skipped = self._skipped_prompts(model, mini_batch, self._budgets(model).update)
            self._done[phase] += Work(
                model.update(lengths, num_targets) - model.update(skipped, 0),
                recomputed - model.recomputed(skipped),
            )

    def _budgets(self, model: ModelFlops) -> TokenBudgets:
        return (critic_budgets if model.is_critic else actor_budgets)(self.config)

    def _skipped_prompts(self, model: ModelFlops, batch: TokenBatch, budget: int) -> list[int]:
        plan = self.config.placement
        num_shards = (plan.critic if model.is_critic else plan.actor).num_shards
        return skipped_prompts(Packing.of(batch), num_shards, budget)

    def take(self) -> dict[str, Work]:
        """Return the work since the last call, by phase."""
        done, self._done = self._done, defaultdict(Work)
        return dict(done)


def skipped_prompts(packing: Packing, num_ranks: int, budget: int) -> list[int]:
    """List the lengths of the copies of prefixes that ranks with this budget do not compute."""
    if not any(packing.prefixes):
        return []
    copies: Counter[int] = Counter()
    for rank in packing.split_over_ranks(num_ranks):
        for micro_batch in packing.micro_batches(rank, budget):
            for run in (run for g in packing.prefix_groups(micro_batch) for run in g.runs):
                # A copy of the whole beginning, less that of the beginning that it continues.
                copies[run.end] += len(run.members) - 1
                copies[run.start] -= len(run.members) - 1
    return [length for length in copies.elements() if length]


def sizes(model: ModelFlops, batch: TokenBatch) -> tuple[list[int], int]:
    """Return the length of each row, and the number of tokens that the head computes."""
    mask = batch.tokens["loss_mask"]
    if model.is_critic:
        mask = batch.tokens.get("value_mask", mask)
    return as_rows(batch).lengths.tolist(), int(mask.sum())


def speed_metrics(
    work: Mapping[str, Work], seconds: Mapping[str, float], num_ranks: tuple[int, int],
    peak: float | None,
) -> Metrics:  # fmt: skip
    """Return `perf/tflops/NAME` per rank and, if the card's `peak` FLOP/s are known, utilisations.

    NAME is the phase; for an update, the model that was updated. `num_ranks`: of the actor, of the
    critic. MFU counts the FLOPs that the computation requires, HFU the recomputed ones as well
    (PaLM, appendix B).
    """
    actor_ranks, critic_ranks = num_ranks
    metrics: Metrics = {}
    for phase, done in work.items():
        name = phase.removeprefix("update_")
        size = critic_ranks if phase in CRITIC_PHASES else actor_ranks
        rank_seconds = size * max(seconds[phase], 1e-9)
        metrics[f"perf/tflops/{name}"] = done.model / rank_seconds / 1e12
        if peak is not None:
            metrics[f"perf/mfu/{name}"] = done.model / rank_seconds / peak
            if done.recomputed:
                metrics[f"perf/hfu/{name}"] = (done.model + done.recomputed) / rank_seconds / peak
    return metrics
