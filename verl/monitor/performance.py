"""Performance of one step: seconds of its phases, FLOPs of the ranks, and peak device memory.

Everything is measured on the driver: FLOPs are computed from the sequences it sends and the models'
shapes; seconds are wall-clock time.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from verl.config import Config
from verl.config.policy import BlocksConfig
from verl.machine import GB
from verl.model_shape import read_shape
from verl.monitor.flops import ModelFlops
from verl.packing import Packing
from verl.single_controller.actors import Call
from verl.training.budgets import TokenBudgets, actor_budgets, critic_budgets
from verl.training.devices import PeakMemory
from verl.training.models import LOGITS_PER_CHUNK
from verl.types import Metrics, TokenBatch

RANK_PHASES = (
    "old_log_prob", "values", "update_critic", "update_actor", "guard", "update_weights",
)  # fmt: skip
"""Phases of a step after which the ranks report their peak memory."""
CRITIC_PHASES = {"values": "critic.values", "update_critic": "critic.updates"}
"""Phases in which the critic computes, and the method called on its ranks."""


class Timings:
    """Wall-clock seconds of the named phases of one step, and the ranks' peak memory per phase.

    The seconds of a phase entered twice add up, and include those of its parts, `PHASE/PART`.
    """

    def __init__(self, take_peak: Callable[[], PeakMemory | None] = lambda: None) -> None:
        """`take_peak` returns the peak since its last call; None on devices without own memory."""
        self.seconds: dict[str, float] = defaultdict(float)
        self.concurrent: dict[str, float] = {}
        """Seconds of work that ran concurrently with the phases and belongs to none of them."""
        self.peaks: dict[str, PeakMemory] = {}
        self.spans: list[tuple[str, float, float]] = []
        """Name, begin and end of each phase, in seconds since the epoch."""
        self._start = time.perf_counter()
        self._take_peak = take_peak
        self._take_peak()  # resets the peak of earlier steps

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body under `name`; after a phase of the ranks, record their peak memory."""
        start, begin = time.perf_counter(), time.time()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start
            self.spans.append((name, begin, time.time()))
        if name in RANK_PHASES:
            self.record_peak(name, self._take_peak())

    def record_peak(self, name: str, peak: PeakMemory | None) -> None:
        """Record the peak memory of a phase or of concurrent work."""
        if peak is not None:
            self.peaks[name] = peak

    @property
    def elapsed(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self._start

    @property
    def phases_total(self) -> float:
        """Total seconds of all phases."""
        return sum(s for name, s in self.seconds.items() if "/" not in name)

    def metrics(self) -> Metrics:
        """Return `timing_s/NAME` and, on devices with memory, `perf/device_memory_gb/PHASE/...`."""
        seconds = {**self.seconds, **self.concurrent, "step": self.elapsed}
        metrics = {f"timing_s/{name}": s for name, s in seconds.items()}
        for name, peak in self.peaks.items():
            metrics[f"perf/device_memory_gb/{name}/allocated"] = peak.allocated / GB
            metrics[f"perf/device_memory_gb/{name}/reserved"] = peak.reserved / GB
        return metrics


@dataclass(frozen=True)
class Work:
    """Numbers of FLOPs."""

    model: float = 0.0
    """FLOPs that the computation requires."""
    recomputed: float = 0.0
    """FLOPs of what was computed a second time to save memory."""

    def __add__(self, other: "Work") -> "Work":
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

    @property
    def pair_costs(self) -> tuple[float, float]:
        """`ModelFlops.pair_cost` of policy and critic; 0 for a model of unknown shape."""
        models = (self.policy, self.critic)
        policy, critic = (0.0 if model is None else model.pair_cost for model in models)
        return policy, critic

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
        num_sp_groups = plan.num_critic_sp_groups if model.is_critic else plan.num_sp_groups
        return Packing.of(batch).skipped_prompts(num_sp_groups, budget, model.pair_cost)

    def take(self) -> dict[str, Work]:
        """Return the work since the last call, by phase."""
        done, self._done = self._done, defaultdict(Work)
        return dict(done)


def model_flops(options: BlocksConfig, path: str, is_critic: bool) -> ModelFlops | None:
    """Return the FLOPs of the model at `path` with its adapter, if any; None: unknown shape."""
    shape = read_shape(path)
    if shape is None:
        return None
    adapter = shape.adapter(options.lora_rank, options.target_modules)
    return ModelFlops(shape, is_critic, adapter, options.enable_gradient_checkpointing is True)


def sizes(model: ModelFlops, batch: TokenBatch) -> tuple[list[int], int]:
    """Return the length of each sequence, and the number of tokens that the head computes."""
    mask = batch.tokens["loss_mask"]
    if model.is_critic:
        mask = batch.tokens.get("value_mask", mask)
    return batch.lengths.tolist(), int(mask.sum())


def critic_seconds(calls: Mapping[str, Sequence[Call]]) -> dict[str, float]:
    """Return the seconds of the critic's phases on its slowest rank, by its `calls` in a step."""

    def rank_seconds(rank_calls: Sequence[Call], method: str) -> float:
        return sum(call.end - call.begin for call in rank_calls if call.method == method)

    return {
        phase: max(rank_seconds(rank_calls, method) for rank_calls in calls.values())
        for phase, method in CRITIC_PHASES.items()
    }


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
