"""The placements that are tried: how cards are divided, their memory, and the time of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from operator import attrgetter
from typing import Any

from search_r1.plan.costs import Costs
from search_r1.plan.simulation import Outcome, Setup, StepCosts, simulate
from search_r1.plan.workload import Batch
from verl.config import Config
from verl.config.run import MOST_SEQS_ON_GPU
from verl.machine import GB, DeviceMemory, HostMemory, Machine
from verl.preflight.memory.estimate import CLOSE, Setting, estimate
from verl.preflight.memory.needs import Memory
from verl.preflight.memory.offload import OPTIONS, changed, choose

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
        """All of them."""
        return self.rollout_cards + self.train_cards + self.critic_cards

    @property
    def num_engines(self) -> int:
        """Replicas."""
        return (self.rollout_cards or self.train_cards) // self.tensor_parallel

    @property
    def name(self) -> str:
        """As the table shows it."""
        own = f" + {self.critic_cards}" if self.critic_cards else ""
        if self.shares_cards:
            return f"shared{own}"
        return f"{self.rollout_cards} + {self.train_cards}{own}"


@dataclass(frozen=True)
class Room:
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
class Planned:
    """A placement with what it comes to."""

    placement: Placement
    room: Room
    outcome: Outcome
    card_idle: float
    """Share of card-seconds in which neither an engine nor a rank computes."""


def divisions(
    cards: int, rollout_cards: Sequence[int], staleness: Sequence[int],
    budgets: Sequence[int | None], sizes: Sequence[int], critics: int = 0,
) -> Iterator[Placement]:  # fmt: skip
    """Every placement of these that leaves whole engines and a rank, beside cards of `critics`.

    On shared cards engines sleep while ranks train: there is no staleness there.
    """
    for size in sizes:
        for rollout in rollout_cards:
            train = cards - critics - rollout
            if train < 1 or (rollout or train) % size:
                continue
            for budget in budgets:
                for stale in (s for s in staleness if rollout or not s):
                    yield Placement(rollout, train, stale, budget, size, critics)


def room(placement: Placement, costs: Costs, batch: Batch, card_gb: float) -> Room:
    """Memory by the preflight's estimate, and how many requests an engine runs at once."""
    in_flight = (placement.staleness + 1) * len(batch.dialogues)
    most = costs.config.actor_rollout_ref.rollout.max_num_seqs or MOST_SEQS_ON_GPU
    slots = min(most, -(-in_flight // placement.num_engines))
    if not card_gb or costs.shape is None:
        return Room(slots)
    config, card = options_of(placement, costs.config), int(card_gb * GB)
    config = changed(config, {f"{ROLLOUT}.max_num_seqs": slots})
    devices = (DeviceMemory(card, card),) * placement.cards
    machine = Machine(HostMemory(AMPLE, AMPLE), AMPLE, devices)
    setting = Setting(costs.shape, costs.critic or costs.shape, True, machine)
    chosen = choose(config, setting)
    found = estimate(chosen, setting)
    assert found.engine is not None, "there are engines on GPUs"
    held, engine = found.most(Memory.DEVICE), found.most(found.engine.memory)
    moved = sum(n.bytes for n in found.needs if n.memory is Memory.HOST and ": " in n.what)
    cached = int(found.engine.cached_tokens * len(batch.lengths) / sum(batch.lengths))
    return Room(
        max(1, min(slots, cached)),
        rank_gb=held / GB,
        engine_gb=engine / GB,
        fits=not found.shortages(chosen, machine, CLOSE),
        waits=tuple(what for key, what in OPTIONS.items() if attrgetter(key)(chosen)),
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
    """The run's options on these cards, all on one node."""
    single = {"trainer.nnodes": 1, f"{ROLLOUT}.num_replicas": None}
    return changed(config, {**single, **changes(placement)})


def plan(
    placement: Placement, costs: Costs, batches: Sequence[Batch], room: Room, steps: int
) -> Planned:
    """Simulate a placement."""
    costs = replace(costs, config=options_of(placement, costs.config))
    setup = Setup(
        costs.engine(batches[0], placement.tensor_parallel, room.slots),
        placement.num_engines,
        StepCosts(
            train_s=cache(partial(costs.train_s, offloaded=room.offloaded)),
            driver_s=cache(costs.driver_s),
            publish_s=costs.publish_s,
            adopt_s=costs.adopt_s,
            switch_s=costs.rates.switch_s,
        ),
        placement.shares_cards,
        placement.staleness,
    )
    outcome = simulate(setup, batches, steps)
    engines = placement.num_engines * placement.tensor_parallel * outcome.engine_busy
    busy = engines + (placement.train_cards + placement.critic_cards) * outcome.trainer_busy
    return Planned(placement, room, outcome, 1 - busy / placement.cards)
