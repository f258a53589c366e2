"""The plan of processes to kill and moments, drawn from a seed before the run starts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum


class Victim(StrEnum):
    """A process of a run."""

    DRIVER = "driver"
    RANK = "rank"
    REPLICA = "replica"
    ENGINE = "engine"


class Moment(StrEnum):
    """The event to wait for before the delay."""

    START = "start"
    """The run was started, or is restarting by itself."""
    STEP = "step"
    """Another step has ended."""
    SAVING = "saving"
    """A checkpoint is half written."""


@dataclass(frozen=True)
class Kill:
    """A planned SIGKILL."""

    number: int
    victim: Victim
    moment: Moment
    delay: float
    """Seconds after the moment."""


START_STEPS = 10
"""Maximum delay during a start, in durations of a step."""
SAVING_DELAY = 0.2
"""Maximum seconds after the start of writing a checkpoint."""
START_SHARE = 0.15
"""Share of kills during a start, among the kills that are not during saving."""


def plan(num_kills: int, seed: int, step_seconds: float) -> list[Kill]:
    """Plan kills: of every five, one each of driver, rank, replica, engine core, and during saving.

    Kills during saving hit the driver or a rank. Kills after a step come within the duration of two
    steps, so that they fall into any phase.
    """
    draw = random.Random(seed)
    kinds: list[Victim | Moment] = [*Victim, Moment.SAVING]
    drawn: list[Victim | Moment] = []
    while len(drawn) < num_kills:
        drawn += draw.sample(kinds, len(kinds))
    kills = []
    for number, kind in enumerate(drawn[:num_kills], 1):
        if isinstance(kind, Moment):
            victim = draw.choice([Victim.DRIVER, Victim.RANK])
            kills.append(Kill(number, victim, kind, draw.uniform(0, SAVING_DELAY)))
        elif kind is Victim.DRIVER and draw.random() < START_SHARE * len(Victim):
            delay = draw.uniform(0, START_STEPS * step_seconds)
            kills.append(Kill(number, kind, Moment.START, delay))
        else:
            kills.append(Kill(number, kind, Moment.STEP, draw.uniform(0, 2 * step_seconds)))
    return kills
