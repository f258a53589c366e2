"""Placements of engines and ranks on the cards: their memory, and the costs of a step.

Speeds of engines and ranks are given or measured, or computed from the model and the rates of the
cards in `RateOptions`: decoding is limited by reading weights and caches from memory, training and
reading prompts by matrix products.
"""

import math
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
from verl.config.policy import ActorConfig, BlocksConfig, CriticConfig
from verl.errors import ConfigError, explain
from verl.machine import GB, DeviceMemory, HostMemory, Machine
from verl.model_shape import ModelShape
from verl.monitor.flops import ModelFlops
from verl.preflight.memory.check import (
    OFFLOAD_OPTIONS,
    choose_memory,
    peak_rank_bytes,
    with_options,
)
from verl.preflight.memory.estimate import WARN_ABOVE, Setting, estimate
from verl.preflight.memory.needs import FLOAT, Memory, has_critic, kv_bytes
from verl.rollout.interface import engine_takes_adapter
from verl.training.budgets import actor_budgets, critic_budgets

ITEM = 2
"""Bytes of a weight or cached value in an engine, and of a weight that FSDP gathers."""
WRITE_GB_S, READ_GB_S = 0.54, 1.4
"""Measured GB/s of writing and loading weights as files in shared memory, with one thread."""
SWITCH_S = 3.0
"""Assumed seconds in which engines fall asleep and wake up."""
DRIVER_TOKENS_S = 750_000.0
"""Measured tokens/s of computing rewards and building the batch."""


def read_decode(text: str) -> list[tuple[float, float]]:
    """Parse `--decode` into points of running sequences and tokens/s. Raises ConfigError."""
    try:
        pairs = [point.split(":") for point in text.split(",")]
        points = [(float(sequences), float(rate)) for sequences, rate in pairs]
    except ValueError:
        points = []
    num_loads = len({sequences for sequences, _ in points})
    if num_loads >= 2 and all(x > 0 for point in points for x in point):
        return points
    expected = "sequences:tokens/s of two loads or more, all above 0"
    raise ConfigError(explain("--decode", repr(text), expected, "--decode 64:5200,256:15000"))


def fit_decode(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit `step_s` and `sequence_s`, neither below 0, to points of running sequences and tokens/s.

    A step of n sequences takes n / rate seconds; the fit minimises relative errors.
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
    """Computes the costs of a step for the options of one run."""

    config: Config
    rates: RateOptions
    shape: ModelShape | None
    """The policy's shape; None if it is unknown, for which every rate must be given."""
    critic: ModelShape | None = None
    """The critic's shape; None if it is the policy's."""
    decode: tuple[float, float] | None = None
    """Measured `step_s` and `sequence_s`."""

    def engine_rates(self, batch: Batch, size: int, slots: int) -> EngineRates:
        """Return the speed of an engine on `size` cards."""
        step_s, sequence_s = self.decode or self._decode_s(batch, size)
        prefill = self.rates.prefill_tokens_s
        if prefill is None:
            prefill = size * self._card_flops_s / (2 * self._policy_shape().linear_weights)
        return EngineRates(step_s, sequence_s, prefill, slots)

    def _decode_s(self, batch: Batch, size: int) -> tuple[float, float]:
        """Return the seconds of an engine step, and those that each sequence adds.

        A step reads the weights once and each sequence's cache, and computes each sequence's token.
        """
        if self.rates.decode:
            return fit_decode(read_decode(self.rates.decode))
        shape, bandwidth = self._policy_shape(), 1e12 * self.rates.memory_tb_s
        # The mean context: it grows from nothing to the length of the dialogue.
        context = sum(batch.lengths) / len(batch.lengths) / 2
        read_weights_s = ITEM * shape.parameters() / size / bandwidth
        read_cache_s = context * kv_bytes(shape, ITEM, size) / bandwidth
        products_s = 2 * shape.parameters() / size / self._card_flops_s
        return self.rates.step_ms / 1e3 + read_weights_s, read_cache_s + products_s

    @property
    def _card_flops_s(self) -> float:
        return 1e12 * self.rates.train_tflops

    def train_s(self, batch: Batch, offloaded: float = 0) -> float:
        """Return the seconds of all passes over a batch.

        In each update a rank copies `offloaded` bytes from the host to its card and back. A critic
        on separate cards computes values while the actor and the reference compute log-probs, and
        is updated while the actor is; each time the slower of both counts.
        """
        config = self.config
        copy_s = 2 * offloaded * config.updates_per_step / (self.rates.host_gb_s * GB)
        if self.rates.train_tokens_s is not None:
            return copy_s + sum(batch.lengths) / (self.rates.train_tokens_s * config.num_ranks)
        num_forwards = int(config.needs_reference)
        if config.old_log_probs == "recompute":
            num_forwards += config.updates_per_step > 1 or config.kl_in_reward
        forward_s, update_s = self._passes_s(batch, num_forwards)
        if not has_critic(config):
            return copy_s + forward_s + update_s
        values_s, critic_update_s = self._passes_s(batch, num_forwards=1, is_critic=True)
        if config.has_own_critic:
            return copy_s + max(forward_s, values_s) + max(update_s, critic_update_s)
        return copy_s + forward_s + update_s + values_s + critic_update_s

    def _passes_s(
        self, batch: Batch, num_forwards: int, is_critic: bool = False
    ) -> tuple[float, float]:
        """Return the seconds of a model's forward passes over a batch, and of its updates.

        A micro-batch takes at least as long as gathering the weights for it: once in a forward
        pass; in an update twice, and gradients are reduced.
        """
        config, actor = self.config, self.config.actor_rollout_ref.actor
        shape = self._policy_shape()
        section: ActorConfig | CriticConfig = actor
        model: BlocksConfig = config.actor_rollout_ref.model
        ranks, sp_size = config.num_ranks, actor.ulysses_sequence_parallel_size
        budgets = actor_budgets(config)
        if is_critic:
            shape, model, section = self.critic or shape, config.critic.model, config.critic
            ranks, sp_size = config.num_critic_ranks, config.critic_sp_size
            budgets = critic_budgets(config)
        adapter = shape.adapter(model.lora_rank, model.target_modules)
        # The estimate of memory assumes checkpointing too if the option is undecided.
        has_checkpointing = model.enable_gradient_checkpointing in (True, None)
        flops = ModelFlops(shape, is_critic, adapter, has_checkpointing)

        lengths, num_targets = batch.lengths, batch.policy_tokens
        flops_s, link = self._card_flops_s * ranks, self.rates.link_gb_s * GB
        forward_s = flops.forward(lengths, num_targets) / flops_s
        update_s = (flops.update(lengths, num_targets) + flops.recomputed(lengths)) / flops_s
        # A rank receives the shards of the others.
        received = shape.parameters() * (ranks - 1) / ranks
        gather_s, reduce_s = ITEM * received / link, 0 if adapter else FLOAT * received / link

        tokens, epochs = sum(lengths) / ranks, section.ppo_epochs
        micro_batches = math.ceil(tokens / (budgets.inference // sp_size))
        forward_s = num_forwards * max(forward_s, micro_batches * gather_s)
        size = section.ppo_mini_batch_size or actor.ppo_mini_batch_size
        num_updates = math.ceil(config.num_trajectories / size) * epochs
        micro_batches = max(num_updates, math.ceil(tokens * epochs / (budgets.update // sp_size)))
        update_s = max(epochs * update_s, micro_batches * (2 * gather_s + reduce_s))
        return forward_s, update_s

    def driver_s(self, batch: Batch) -> float:
        """Return the seconds in which only the driver works on a batch."""
        return sum(batch.lengths) / (self.rates.driver_tokens_s or DRIVER_TOKENS_S)

    @property
    def switch_s(self) -> float:
        """Seconds in which engines fall asleep and wake up."""
        return SWITCH_S if self.rates.switch_s is None else self.rates.switch_s

    @property
    def publish_s(self) -> float:
        """Seconds until new weights are written."""
        given = self.rates.publish_s
        return self._transfer_bytes() / (WRITE_GB_S * GB) if given is None else given

    @property
    def adopt_s(self) -> float:
        """Seconds in which an engine loads them."""
        given = self.rates.adopt_s
        return self._transfer_bytes() / (READ_GB_S * GB) if given is None else given

    def _transfer_bytes(self) -> int:
        model = self.config.actor_rollout_ref.model
        if engine_takes_adapter(self.config):
            return FLOAT * self._policy_shape().adapter(model.lora_rank, model.target_modules)
        return ITEM * self._policy_shape().parameters()

    def _policy_shape(self) -> ModelShape:
        """Return the policy's shape. Raises ConfigError if it is unknown."""
        if self.shape is not None:
            return self.shape
        got = f"{self.config.actor_rollout_ref.model.path}, whose config.json is not here"
        fix = ("name its folder, or give --decode, --prefill-tokens-s, --train-tokens-s, "
               "--publish-s and --adopt-s")  # fmt: skip
        expected = "a dense model on this machine, to compute rates from"
        raise ConfigError(explain("actor_rollout_ref.model.path", got, expected, fix))


UNLIMITED = 1 << 60
"""Bytes of host memory, so that it limits no placement."""
OWN_SHARE = 0.9
"""Share of a card that an engine uses if it has the card for itself."""
ROLLOUT = "actor_rollout_ref.rollout"
BUDGET = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"


@dataclass(frozen=True)
class Placement:
    """One way to use the cards."""

    rollout_cards: int
    """Cards of engines only; 0 if engines and ranks share all cards."""
    train_cards: int
    staleness: int
    token_budget: int | None
    """Tokens of a micro-batch; None: as the run's options say."""
    tensor_parallel: int
    critic_cards: int = 0
    """Cards of the critic only."""

    @property
    def shares_cards(self) -> bool:
        """Whether engines share the ranks' cards, and sleep while the ranks train."""
        return self.rollout_cards == 0

    @property
    def cards(self) -> int:
        return self.rollout_cards + self.train_cards + self.critic_cards

    @property
    def num_engines(self) -> int:
        return (self.rollout_cards or self.train_cards) // self.tensor_parallel

    @property
    def name(self) -> str:
        """The division of the cards: of engines + ranks + critic."""
        critic = f" + {self.critic_cards}" if self.critic_cards else ""
        if self.shares_cards:
            return f"shared{critic}"
        return f"{self.rollout_cards} + {self.train_cards}{critic}"


@dataclass(frozen=True)
class Capacity:
    """The requests that an engine can run, and the memory of the cards in GB of 10^9 bytes."""

    slots: int
    """Requests that an engine runs at once."""
    rank_gb: float | None = None
    """Peak memory of a rank's card; None if memory is not estimated."""
    engine_gb: float | None = None
    """Peak memory of an engine's card."""
    fits: bool = True
    waits: tuple[str, ...] = ()
    """Names of what is offloaded to the host."""
    offloaded: float = 0.0
    """Bytes that a rank copies to its card and back in each update."""


@dataclass(frozen=True)
class PlacementResult:
    """A placement with its simulated steps."""

    placement: Placement
    capacity: Capacity
    outcome: Outcome
    card_idle: float
    """Share of card-seconds in which neither an engine nor a rank computes."""


def placements(
    cards: int, rollout_cards: Sequence[int], staleness: Sequence[int],
    budgets: Sequence[int | None], sizes: Sequence[int], critic_cards: int = 0, sp_size: int = 1,
) -> Iterator[Placement]:  # fmt: skip
    """Yield all placements with whole engines and whole sequence-parallel groups of ranks.

    Shared cards are placed only with staleness 0. `sizes`: cards of an engine.
    """
    for size in sizes:
        for rollout in rollout_cards:
            train = cards - critic_cards - rollout
            if train < 1 or (rollout or train) % size or train % sp_size:
                continue
            for budget in budgets:
                for stale in staleness:
                    if rollout or not stale:
                        yield Placement(rollout, train, stale, budget, size, critic_cards)


def estimate_capacity(placement: Placement, costs: Costs, batch: Batch, card_gb: float) -> Capacity:
    """Return the slots of an engine and, by the preflight's estimate, the memory of the cards.

    Memory is not estimated if `card_gb` is 0 or the model's shape is unknown.
    """
    config = placed_config(placement, costs.config)
    slots = config.max_num_seqs(on_gpu=True)
    if not card_gb or costs.shape is None:
        return Capacity(slots)
    card = int(card_gb * GB)
    devices = (DeviceMemory(card, card),) * placement.cards
    machine = Machine(HostMemory(UNLIMITED, UNLIMITED), UNLIMITED, devices)
    setting = Setting(costs.shape, costs.critic or costs.shape, True, machine)
    config = choose_memory(config, setting)
    needed = estimate(config, setting)
    assert needed.engine is not None, "every placement has vLLM engines on GPUs"
    # The names of what models hold on the host are "MODEL: PART".
    on_host = sum(n.bytes for n in needed.needs if n.memory is Memory.HOST and ": " in n.name)
    cached_dialogues = int(needed.engine.cached_tokens * len(batch.lengths) / sum(batch.lengths))
    return Capacity(
        max(1, min(slots, cached_dialogues)),
        rank_gb=peak_rank_bytes(needed) / GB,
        engine_gb=needed.peak_bytes(needed.engine.memory) / GB,
        fits=not needed.shortages(config, machine, WARN_ABOVE),
        waits=tuple(part for key, part in OFFLOAD_OPTIONS.items() if attrgetter(key)(config)),
        offloaded=on_host / placement.train_cards,
    )


def placement_options(placement: Placement) -> dict[str, Any]:
    """Return the options that give a run on one node this placement."""
    options: dict[str, Any] = {
        "trainer.n_gpus_per_node": placement.train_cards,
        "trainer.rollout_gpus": placement.rollout_cards,
        f"{ROLLOUT}.tensor_model_parallel_size": placement.tensor_parallel,
        f"{ROLLOUT}.max_staleness": placement.staleness,
    }
    if placement.critic_cards:
        options |= {"critic.nnodes": 1, "critic.n_gpus_per_node": placement.critic_cards}
    if placement.token_budget is not None:
        options[BUDGET] = placement.token_budget
    if not placement.shares_cards:
        options[f"{ROLLOUT}.gpu_memory_utilization"] = OWN_SHARE
    return options


def placed_config(placement: Placement, config: Config) -> Config:
    """Return the run's options with this placement, on one node and with its own vLLM engines."""
    options = {"trainer.nnodes": 1, f"{ROLLOUT}.num_replicas": None, f"{ROLLOUT}.name": "vllm",
               f"{ROLLOUT}.url": None, "data.rollouts": None}  # fmt: skip
    if config.trainer.device == "auto":  # the cards need not be on this machine
        options["trainer.device"] = "cuda"
    return with_options(config, {**options, **placement_options(placement)})


def simulate_placement(
    placement: Placement, costs: Costs, batches: Sequence[Batch], capacity: Capacity, steps: int
) -> PlacementResult:
    """Simulate `steps` steps of a placement."""
    costs = replace(costs, config=placed_config(placement, costs.config))
    train_s = partial(costs.train_s, offloaded=capacity.offloaded)
    step_costs = StepCosts(cache(train_s), cache(costs.driver_s), costs.publish_s, costs.adopt_s,
                           costs.switch_s)  # fmt: skip
    engine = costs.engine_rates(batches[0], placement.tensor_parallel, capacity.slots)
    setup = Setup(engine, placement.num_engines, step_costs, placement.shares_cards,
                  placement.staleness)  # fmt: skip
    outcome = simulate(setup, batches, steps)
    engine_cards = placement.num_engines * placement.tensor_parallel
    rank_cards = placement.train_cards + placement.critic_cards
    busy = engine_cards * outcome.engine_busy + rank_cards * outcome.trainer_busy
    return PlacementResult(placement, capacity, outcome, 1 - busy / placement.cards)
