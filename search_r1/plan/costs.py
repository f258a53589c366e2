"""Seconds of an engine's step and of a rank's passes: given by hand, or from model and card.

Computed rates are what the parts would take at the speeds of `RateOptions`, which are assumptions
until a run was measured: decoding reads weights and caches from memory, training multiplies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from search_r1.plan.engine import EngineRates
from search_r1.plan.options import RateOptions
from search_r1.plan.workload import Batch
from verl.config import Config
from verl.errors import ConfigError, explain
from verl.machine import GB
from verl.model_shape import ModelShape
from verl.monitor.flops import ModelFlops
from verl.preflight.memory.needs import has_critic, kv_bytes
from verl.training.budgets import actor_budgets, critic_budgets

ITEM = 2
"""Bytes of a weight or cached value that engines hold."""
WRITE_GB_S, READ_GB_S = 0.54, 1.4
"""Of weights through files in shared memory, as measured with one thread."""
GATHERED, REDUCED = 2, 4
"""Bytes of a weight that FSDP gathers, and of a gradient that it spreads."""


def read_decode(text: str) -> list[tuple[float, float]]:
    """The points of `--decode`, sequences and tokens/s. Raises ConfigError."""
    try:
        pairs = [point.split(":") for point in text.split(",")]
        points = [(float(sequences), float(rate)) for sequences, rate in pairs]
        if len({sequences for sequences, _ in points}) >= 2 and all(
            x > 0 for p in points for x in p
        ):
            return points
    except ValueError:
        pass
    expected = "sequences:tokens/s of two loads or more, all above 0"
    raise ConfigError(explain("--decode", repr(text), expected, "--decode 64:5200,256:15000"))


def fit_decode(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """`step_s` and `sequence_s`, neither below 0, of engines that decode so fast.

    A step of n sequences takes n / rate; residuals are relative to that.
    """
    loads = np.array([n for n, _ in points])
    steps = np.array([n / rate for n, rate in points])
    matrix = np.stack([np.ones_like(loads), loads], axis=1) / steps[:, None]
    (step_s, sequence_s), *_ = np.linalg.lstsq(matrix, np.ones_like(loads), rcond=None)
    if sequence_s < 0:
        return float(steps.mean()), 0.0
    if step_s < 0:
        return 0.0, float((steps / loads).mean())
    return float(step_s), float(sequence_s)


@dataclass(frozen=True)
class Costs:
    """What the parts of a step cost for one run's options."""

    config: Config
    rates: RateOptions
    shape: ModelShape | None
    """Of the policy; None where every rate is given."""
    critic: ModelShape | None = None
    decode: tuple[float, float] | None = None
    """`step_s` and `sequence_s` as measured."""

    def engine(self, batch: Batch, size: int, slots: int) -> EngineRates:
        """Of an engine on `size` cards."""
        step_s, sequence_s = self.decode or self._decode(batch, size)
        prefill = self.rates.prefill_tokens_s
        if prefill is None:
            prefill = size * 1e12 * self.rates.train_tflops / (2 * self._shape().linear_weights)
        return EngineRates(step_s, sequence_s, prefill, slots)

    def _decode(self, batch: Batch, size: int) -> tuple[float, float]:
        """A step reads the weights once, and each sequence's cache; sequences multiply too."""
        if self.rates.decode:
            return fit_decode(read_decode(self.rates.decode))
        shape, bandwidth = self._shape(), 1e12 * self.rates.memory_tb_s
        context = sum(batch.lengths) / len(batch.lengths) / 2  # it grows from nothing to its length
        weights = ITEM * shape.parameters() / size / bandwidth
        cache = context * kv_bytes(shape, ITEM, size) / bandwidth
        products = 2 * shape.parameters() / size / (1e12 * self.rates.train_tflops)
        return self.rates.step_ms / 1e3 + weights, cache + products

    def train_s(self, batch: Batch, offloaded: float = 0) -> float:
        """Of all passes; `offloaded` bytes of each rank go to the card and back at each update.

        A critic on cards of its own works while the actor does: the slower of both counts.
        """
        config, tokens = self.config, sum(batch.lengths)
        ranks = config.num_ranks
        moved = 2 * offloaded * config.updates_per_step / (self.rates.host_gb_s * GB)
        if self.rates.train_tokens_s is not None:
            return moved + tokens / (self.rates.train_tokens_s * ranks)
        actor, reads = config.actor_rollout_ref.actor, int(config.needs_reference)
        if config.old_log_probs == "recompute":
            reads += config.updates_per_step > 1 or config.kl_in_reward
        model = config.actor_rollout_ref.model
        adapter = self._shape().adapter(model.lora_rank, model.target_modules)
        policy = ModelFlops(
            self._shape(),
            adapter=adapter,
            has_checkpointing=model.enable_gradient_checkpointing in (True, None),
        )
        budget = actor_budgets(config).update * config.num_crews // ranks
        seconds = self._passes(policy, batch, budget, ranks, reads, actor.ppo_epochs)
        if has_critic(config):
            own = config.critic
            critic = ModelFlops(
                self.critic or self._shape(), is_critic=True,
                adapter=self._shape().adapter(own.model.lora_rank, own.model.target_modules),
                has_checkpointing=own.model.enable_gradient_checkpointing in (True, None),
            )  # fmt: skip
            ranks = config.num_critic_ranks
            budget = critic_budgets(config).update * config.num_critic_crews // ranks
            values = self._passes(critic, batch, budget, ranks, 1, own.ppo_epochs)
            seconds = max(seconds, values) if config.has_own_critic else seconds + values
        return seconds + moved

    def _passes(
        self, model: ModelFlops, batch: Batch, budget: int, ranks: int, reads: int, epochs: int
    ) -> float:
        """Forwards and updates of one model; a micro-batch takes as long as gathering for it."""
        lengths, wanted = batch.lengths, batch.sampled
        forward = model.forward(lengths, wanted)
        update = model.update(lengths, wanted) + model.recomputed(lengths)
        per_rank, speed = sum(lengths) / ranks, 1e12 * self.rates.train_tflops * ranks
        parameters = model.shape.parameters() * (ranks - 1) / ranks
        gather = GATHERED * parameters / (self.rates.link_gb_s * GB)
        spread = 0 if model.adapter else REDUCED * parameters / (self.rates.link_gb_s * GB)
        micro = max(1, -(-per_rank // (2 * budget)))
        seconds = reads * max(forward / speed, micro * gather)
        micro = max(self.config.updates_per_step, -(-per_rank * epochs // budget))
        return seconds + max(epochs * update / speed, micro * (2 * gather + spread))

    def driver_s(self, batch: Batch) -> float:
        """Of rewards and of building the batch."""
        return sum(batch.lengths) / self.rates.driver_tokens_s

    @property
    def publish_s(self) -> float:
        """Until new weights are written."""
        given = self.rates.publish_s
        return self._weight_bytes() / (WRITE_GB_S * GB) if given is None else given

    @property
    def adopt_s(self) -> float:
        """Until an engine has read them."""
        given = self.rates.adopt_s
        return self._weight_bytes() / (READ_GB_S * GB) if given is None else given

    def _weight_bytes(self) -> int:
        return ITEM * self._shape().parameters()

    def _shape(self) -> ModelShape:
        """Raises ConfigError where a rate is neither given nor can be computed."""
        if self.shape is not None:
            return self.shape
        got = f"{self.config.actor_rollout_ref.model.path}, whose config.json is not here"
        fix = ("name its folder, or give --decode, --prefill-tokens-s, --train-tokens-s, "
               "--publish-s and --adopt-s")  # fmt: skip
        expected = "a dense model on this machine, to compute rates from"
        raise ConfigError(explain("actor_rollout_ref.model.path", got, expected, fix))
