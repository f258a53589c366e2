"""The placements that are tried: how cards are divided, their memory, what a step costs there.

Seconds of an engine's step and of a rank's passes are given by hand, or computed from model and
card at the speeds of `RateOptions`, which are assumptions until a run was measured: decoding reads
weights and caches from memory, training multiplies.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from operator import attrgetter
from typing import Any

import numpy as np

from search_r1.plan.command import RateOptions
from search_r1.plan.simulation import EngineRates, Outcome, Setup, StepCosts, simulate
from search_r1.plan.workload import Batch
from verl.config import Config
from verl.errors import ConfigError, explain
from verl.machine import GB, DeviceMemory, HostMemory, Machine
from verl.model_shape import ModelShape
from verl.monitor.flops import ModelFlops
from verl.preflight.memory.check import (
    OFFLOAD_OPTIONS,
    choose_offload,
    peak_rank_bytes,
    with_options,
)
from verl.preflight.memory.estimate import WARN_ABOVE, Setting, estimate
from verl.preflight.memory.needs import FLOAT, Memory, has_critic, kv_bytes
from verl.rollout.interface import engine_takes_adapter
from verl.training.budgets import TokenBudgets, actor_budgets, critic_budgets

ITEM = 2
"""Bytes of a weight or cached value that engines hold."""
WRITE_GB_S, READ_GB_S = 0.54, 1.4
"""Of weights through files in shared memory, as measured with one thread."""
SWITCH_S, DRIVER_TOKENS_S = 3.0, 750_000.0
"""Of engines that fall asleep and wake up, assumed; of rewards and building a batch, measured."""
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

    def engine_rates(self, batch: Batch, size: int, slots: int) -> EngineRates:
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

        A critic on cards of its own computes values while the actor and the reference compute
        log-probs, and is updated while the actor is: each time the slower of both counts.
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
        forward_s, update_s = self._passes(
            policy,
            batch,
            actor_budgets(config),
            actor.ulysses_sequence_parallel_size,
            ranks,
            reads,
            actor.ppo_epochs,
            config.updates_per_step,
        )
        if has_critic(config):
            own, shape = config.critic, self.critic or self._shape()
            critic = ModelFlops(
                shape, is_critic=True,
                adapter=shape.adapter(own.model.lora_rank, own.model.target_modules),
                has_checkpointing=own.model.enable_gradient_checkpointing in (True, None),
            )  # fmt: skip
            ranks = config.num_critic_ranks
            size = own.ppo_mini_batch_size or actor.ppo_mini_batch_size
            updates = -(-config.num_trajectories // size) * own.ppo_epochs
            values_s, critic_s = self._passes(
                critic,
                batch,
                critic_budgets(config),
                config.critic_sp_size,
                ranks,
                1,
                own.ppo_epochs,
                updates,
            )
            if config.has_own_critic:
                return max(forward_s, values_s) + max(update_s, critic_s) + moved
            moved += values_s + critic_s
        return forward_s + update_s + moved

    def _passes(
        self,
        model: ModelFlops,
        batch: Batch,
        budgets: TokenBudgets,
        sp_size: int,
        ranks: int,
        reads: int,
        epochs: int,
        updates: int,
    ) -> tuple[float, float]:
        """Seconds of one model's forward passes and updates, at least those of gathering."""
        lengths, wanted = batch.lengths, batch.policy_tokens
        forward = model.forward(lengths, wanted)
        update = model.update(lengths, wanted) + model.recomputed(lengths)
        per_rank, speed = sum(lengths) / ranks, 1e12 * self.rates.train_tflops * ranks
        parameters = model.shape.parameters() * (ranks - 1) / ranks
        gather = GATHERED * parameters / (self.rates.link_gb_s * GB)
        spread = 0 if model.adapter else REDUCED * parameters / (self.rates.link_gb_s * GB)
        micro = max(1, -(-per_rank // (budgets.inference // sp_size)))
        seconds = reads * max(forward / speed, micro * gather)
        micro = max(updates, -(-per_rank * epochs // (budgets.update // sp_size)))
        return seconds, max(epochs * update / speed, micro * (2 * gather + spread))

    def driver_s(self, batch: Batch) -> float:
        given = self.rates.driver_tokens_s
        return sum(batch.lengths) / (DRIVER_TOKENS_S if given is None else given)

    @property
    def switch_s(self) -> float:
        given = self.rates.switch_s
        return SWITCH_S if given is None else given

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
        model = self.config.actor_rollout_ref.model
        if engine_takes_adapter(self.config):
            return FLOAT * self._shape().adapter(model.lora_rank, model.target_modules)
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


AMPLE = 1 << 60
"""Bytes of host memory: what the host holds is not looked at."""
OWN_SHARE = 0.9
"""What an engine takes of a card of its own."""
ROLLOUT = "actor_rollout_ref.rollout"
BUDGET = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"


@dataclass(frozen=True)
class Placement:
    """One way to use the cards."""

    rollout_cards: int
    """Cards of engines alone; 0 where engines and ranks share all cards."""
    train_cards: int
    staleness: int
    token_budget: int | None
    """Of a micro-batch; None takes the run's."""
    tensor_parallel: int
    critic_cards: int = 0
    """Cards of a critic that has its own."""

    @property
    def shares_cards(self) -> bool:
        """Engines sleep while ranks train."""
        return self.rollout_cards == 0

    @property
    def cards(self) -> int:
        return self.rollout_cards + self.train_cards + self.critic_cards

    @property
    def num_engines(self) -> int:
        return (self.rollout_cards or self.train_cards) // self.tensor_parallel

    @property
    def name(self) -> str:
        own = f" + {self.critic_cards}" if self.critic_cards else ""
        if self.shares_cards:
            return f"shared{own}"
        return f"{self.rollout_cards} + {self.train_cards}{own}"


@dataclass(frozen=True)
class Capacity:
    """What a placement needs of a card, and what is left for dialogues; GB of 10^9 bytes."""

    slots: int
    rank_gb: float | None = None
    """The most that a rank's card holds; None where memory is not looked at."""
    engine_gb: float | None = None
    """The same of an engine's card."""
    fits: bool = True
    waits: tuple[str, ...] = ()
    """What waits on the host."""
    offloaded: float = 0.0
    """Bytes of it that a rank moves at each update."""


@dataclass(frozen=True)
class PlacementResult:
    """A placement with what it comes to."""

    placement: Placement
    capacity: Capacity
    outcome: Outcome
    card_idle: float
    """Share of card-seconds in which neither an engine nor a rank computes."""


def divisions(
    cards: int, rollout_cards: Sequence[int], staleness: Sequence[int],
    budgets: Sequence[int | None], sizes: Sequence[int], critics: int = 0,
) -> Iterator[Placement]:  # fmt: skip
    """Every placement that leaves whole engines and a rank; on shared cards none is stale."""
    for size in sizes:
        for rollout in rollout_cards:
            train = cards - critics - rollout
            if train < 1 or (rollout or train) % size:
                continue
            for budget in budgets:
                for stale in (s for s in staleness if rollout or not s):
                    yield Placement(rollout, train, stale, budget, size, critics)


def estimate_capacity(placement: Placement, costs: Costs, batch: Batch, card_gb: float) -> Capacity:
    """Memory by the preflight's estimate, and how many requests an engine runs at once."""
    config = options_of(placement, costs.config)
    slots = config.max_num_seqs(on_gpu=True)
    if not card_gb or costs.shape is None:
        return Capacity(slots)
    card = int(card_gb * GB)
    devices = (DeviceMemory(card, card),) * placement.cards
    machine = Machine(HostMemory(AMPLE, AMPLE), AMPLE, devices)
    setting = Setting(costs.shape, costs.critic or costs.shape, True, machine)
    chosen = choose_offload(config, setting)
    found = estimate(chosen, setting)
    assert found.engine is not None, "there are engines on GPUs"
    engine = found.peak_bytes(found.engine.memory)
    moved = sum(n.bytes for n in found.needs if n.memory is Memory.HOST and ": " in n.name)
    cached = int(found.engine.cached_tokens * len(batch.lengths) / sum(batch.lengths))
    return Capacity(
        max(1, min(slots, cached)),
        rank_gb=peak_rank_bytes(found) / GB,
        engine_gb=engine / GB,
        fits=not found.shortages(chosen, machine, WARN_ABOVE),
        waits=tuple(what for key, what in OFFLOAD_OPTIONS.items() if attrgetter(key)(chosen)),
        offloaded=moved / placement.train_cards,
    )


def changes(placement: Placement) -> dict[str, Any]:
    """The options by which a run on one node is placed so."""
    found = {"trainer.n_gpus_per_node": placement.train_cards,
             "trainer.rollout_gpus": placement.rollout_cards,
             f"{ROLLOUT}.tensor_model_parallel_size": placement.tensor_parallel,
             f"{ROLLOUT}.max_staleness": placement.staleness}  # fmt: skip
    if placement.critic_cards:
        found |= {"critic.nnodes": 1, "critic.n_gpus_per_node": placement.critic_cards}
    if placement.token_budget is not None:
        found[BUDGET] = placement.token_budget
    own = {} if placement.shares_cards else {f"{ROLLOUT}.gpu_memory_utilization": OWN_SHARE}
    return {**found, **own}


def options_of(placement: Placement, config: Config) -> Config:
    """The run's options on these cards, all on one node, with engines of its own: vLLM's, whose
    rates are computed."""
    single = {"trainer.nnodes": 1, f"{ROLLOUT}.num_replicas": None, f"{ROLLOUT}.name": "vllm",
              f"{ROLLOUT}.url": None, "data.rollouts": None}  # fmt: skip
    if config.trainer.device == "auto":  # the cards need not be on this machine
        single["trainer.device"] = "cuda"
    return with_options(config, {**single, **changes(placement)})


def simulate_placement(
    placement: Placement, costs: Costs, batches: Sequence[Batch], capacity: Capacity, steps: int
) -> PlacementResult:
    """Simulate a placement."""
    costs = replace(costs, config=options_of(placement, costs.config))
    setup = Setup(
        costs.engine_rates(batches[0], placement.tensor_parallel, capacity.slots),
        placement.num_engines,
        StepCosts(
            train_s=cache(partial(costs.train_s, offloaded=capacity.offloaded)),
            driver_s=cache(costs.driver_s),
            publish_s=costs.publish_s,
            adopt_s=costs.adopt_s,
            switch_s=costs.switch_s,
        ),
        placement.shares_cards,
        placement.staleness,
    )
    outcome = simulate(setup, batches, steps)
    engines = placement.num_engines * placement.tensor_parallel * outcome.engine_busy
    busy = engines + (placement.train_cards + placement.critic_cards) * outcome.trainer_busy
    return PlacementResult(placement, capacity, outcome, 1 - busy / placement.cards)
