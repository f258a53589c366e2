"""Whom to kill, and when: drawn from a seed before the run begins."""

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
    """What is waited for before the delay."""

    START = "start"
    """The run was begun, or is being repaired."""
    STEP = "step"
    """Another step has ended."""
    SAVING = "saving"
    """A checkpoint is half written."""


@dataclass(frozen=True)
class Kill:
    """One SIGKILL of the plan."""

    number: int
    victim: Victim
    moment: Moment
    delay: float
    """Seconds after the moment."""


START_STEPS = 10
"""Longest delay in the course of a start, in steps' time."""
SAVING_DELAY = 0.2
"""Longest delay after a checkpoint was begun, seconds."""
START_SHARE = 0.15
"""Of the kills that don't wait for saving: those that don't wait for a step either."""


def plan(num_kills: int, seed: int, step_seconds: float) -> list[Kill]:
    """`num_kills` kills: of every five, one each of driver, rank, replica, engine core, saving.

    Those in the course of saving hit the driver or a rank. Those after a step come within two
    steps' time, so that they fall into any phase.
    """
    draw = random.Random(seed)
    kinds: list[Victim | Moment] = [*Victim, Moment.SAVING]
    rounds = [draw.sample(kinds, len(kinds)) for _ in range(0, num_kills, len(kinds))]
    kills = []
    for number, kind in enumerate([kind for one in rounds for kind in one][:num_kills], 1):
        if isinstance(kind, Moment):
            victim = draw.choice([Victim.DRIVER, Victim.RANK])
            kills.append(Kill(number, victim, kind, draw.uniform(0, SAVING_DELAY)))
        elif kind is Victim.DRIVER and draw.random() < START_SHARE * len(Victim):
            delay = draw.uniform(0, START_STEPS * step_seconds)
            kills.append(Kill(number, kind, Moment.START, delay))
        else:
            kills.append(Kill(number, kind, Moment.STEP, draw.uniform(0, 2 * step_seconds)))
    return kills
