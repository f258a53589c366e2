"""What a step's work on the ranks was worth: FLOPs against seconds, and the devices' memory.

All of it is seen from the driver: FLOPs follow from the sequences it sends and the models' shapes,
seconds are those that a user waits.
"""

from __future__ import annotations

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
"""The phases of a step after which the ranks say how much memory they took."""
CRITIC_PHASES = {"values": "critic.values", "update_critic": "critic.updates"}
"""Those in which the critic works, and what its ranks are called for."""


class Timings:
    """Wall seconds of the named phases of one step, and the ranks' peak memory in those of theirs.

    A phase entered twice adds up. `PHASE/PART` is a part of a phase, whose seconds are in the
    phase's already.
    """

    def __init__(self, take_peak: Callable[[], PeakMemory | None] = lambda: None) -> None:
        """`take_peak` gives the peak since its last call, None where devices have no memory."""
        self.seconds: dict[str, float] = defaultdict(float)
        self.concurrent: dict[str, float] = {}
        """Seconds of what was done while the phases went on, in none of them."""
        self.peaks: dict[str, PeakMemory] = {}
        self.spans: list[tuple[str, float, float]] = []
        """Name, begin and end of each phase, in seconds since the epoch."""
        self._start = time.perf_counter()
        self._take_peak = take_peak
        self._take_peak()  # what came before this step

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body under `name`; a phase of the ranks ends with a call to them."""
        start, begin = time.perf_counter(), time.time()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start
            self.spans.append((name, begin, time.time()))
        if name in RANK_PHASES:
            self.record_peak(name, self._take_peak())

    def record_peak(self, name: str, peak: PeakMemory | None) -> None:
        """Keep the peak of a phase, or of what was done beside."""
        if peak is not None:
            self.peaks[name] = peak

    @property
    def elapsed(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self._start

    @property
    def phases_total(self) -> float:
        """Seconds of all phases together."""
        return sum(s for name, s in self.seconds.items() if "/" not in name)

    def metrics(self) -> Metrics:
        """`timing_s/NAME`, and `perf/device_memory_gb/PHASE/...` where devices have memory."""
        seconds = {**self.seconds, **self.concurrent, "step": self.elapsed}
        found = {f"timing_s/{name}": s for name, s in seconds.items()}
        for name, peak in self.peaks.items():
            found[f"perf/device_memory_gb/{name}/allocated"] = peak.allocated / GB
            found[f"perf/device_memory_gb/{name}/reserved"] = peak.reserved / GB
        return found


@dataclass(frozen=True)
class Work:
    """FLOPs that were done."""

    model: float = 0.0
    """What the maths needs."""
    recomputed: float = 0.0
    """What was computed a second time to save memory."""

    def __add__(self, other: Work) -> Work:
        return Work(self.model + other.model, self.recomputed + other.recomputed)


class WorkCounter:
    """Counts the FLOPs that the ranks are asked for; none of a model whose shape is unknown.

    Copies of a prompt that the ranks need not compute are not counted.
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
        """`ModelFlops.pair_cost` of policy and critic; 0 of a model whose shape is unknown."""
        models = (self.policy, self.critic)
        policy, critic = (0.0 if model is None else model.pair_cost for model in models)
        return policy, critic

    def add_forward(self, phase: str, model: ModelFlops | None, batch: TokenBatch) -> None:
        """A forward of `model` over the batch."""
        if model is not None:
            spared = self._spared(model, batch, self._budgets(model).inference)
            done = model.forward(*sizes(model, batch)) - model.forward(spared, 0)
            self._done[phase] += Work(done)

    def add_update(self, phase: str, model: ModelFlops | None, mini_batch: TokenBatch) -> None:
        """Forward and backward of `model` over the mini-batch."""
        if model is not None:
            lengths, num_targets = sizes(model, mini_batch)
            kept = num_targets if model.is_critic else LOGITS_PER_CHUNK // model.shape.vocab
            again = model.recomputed(lengths, max(num_targets - kept, 0))
            spared = self._spared(model, mini_batch, self._budgets(model).update)
            self._done[phase] += Work(
                model.update(lengths, num_targets) - model.update(spared, 0),
                again - model.recomputed(spared),
            )

    def _budgets(self, model: ModelFlops) -> TokenBudgets:
        return (critic_budgets if model.is_critic else actor_budgets)(self.config)

    def _spared(self, model: ModelFlops, batch: TokenBatch, budget: int) -> list[int]:
        config = self.config
        num_sp_groups = config.num_critic_sp_groups if model.is_critic else config.num_sp_groups
        return Packing.of(batch).spared(num_sp_groups, budget, model.pair_cost)

    def take(self) -> dict[str, Work]:
        """What was done since the last call, by phase."""
        done, self._done = self._done, defaultdict(Work)
        return dict(done)


def model_flops(options: BlocksConfig, path: str, is_critic: bool) -> ModelFlops | None:
    """The FLOPs of the model at `path` with its adapter, if any; None for an unknown shape."""
    shape = read_shape(path)
    if shape is None:
        return None
    adapter = shape.adapter(options.lora_rank, options.target_modules)
    return ModelFlops(shape, is_critic, adapter, options.enable_gradient_checkpointing is True)


def sizes(model: ModelFlops, batch: TokenBatch) -> tuple[list[int], int]:
    """Tokens of each sequence, and those for which the model's head is asked."""
    mask = batch.tokens["loss_mask"]
    if model.is_critic:
        mask = batch.tokens.get("value_mask", mask)
    return batch.lengths.tolist(), int(mask.sum())


def critic_seconds(calls: Mapping[str, Sequence[Call]]) -> dict[str, float]:
    """Seconds of the critic's values and updates, by phase, of the rank that took longest.

    `calls`: what each rank was called for in a step.
    """
    return {
        phase: max(
            sum(c.end - c.begin for c in made if c.method == method) for made in calls.values()
        )
        for phase, method in CRITIC_PHASES.items()
    }


def speed_metrics(
    work: Mapping[str, Work], seconds: Mapping[str, float], num_ranks: tuple[int, int],
    peak: float | None,
) -> Metrics:  # fmt: skip
    """`perf/tflops/NAME` of a rank, and utilisations where a card's FLOP/s at most, `peak`, are
    known. NAME is the phase, of an update what learned; `num_ranks`: of the actor, of the critic.

    MFU counts what the maths needs, HFU what was computed again too (PaLM, appendix B).
    """
    found: Metrics = {}
    for phase, done in work.items():
        size = num_ranks[phase in CRITIC_PHASES]
        name, rank_seconds = phase.removeprefix("update_"), size * max(seconds[phase], 1e-9)
        found[f"perf/tflops/{name}"] = done.model / rank_seconds / 1e12
        if peak is not None:
            found[f"perf/mfu/{name}"] = done.model / rank_seconds / peak
            if done.recomputed:
                found[f"perf/hfu/{name}"] = (done.model + done.recomputed) / rank_seconds / peak
    return found
