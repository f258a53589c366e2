"""The kinds of faults, and a plan of them drawn from a seed before the run begins."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from tests.proofs.kills.schedule import Moment, Victim


class Kind(StrEnum):
    """What is done to a run, or to what it depends on."""

    KILL = "SIGKILL"
    FREEZE = "SIGSTOP"
    DISK_FULL = "disk full"
    READ_ONLY = "permission lost"
    REFUSES = "retriever answers 503"
    RESETS = "retriever drops connections"
    HANGS = "retriever hangs"
    GARBAGE = "retriever answers garbage"
    LIES = "retriever answers too few results"
    TRUNCATES = "retriever stops in mid-answer"
    DIES = "retriever dies"
    OTHER_CORPUS = "retriever comes back with another corpus"


SHARES = {
    Kind.KILL: 10, Kind.FREEZE: 20, Kind.DISK_FULL: 4, Kind.READ_ONLY: 4, Kind.REFUSES: 12,
    Kind.RESETS: 12, Kind.HANGS: 8, Kind.GARBAGE: 10, Kind.LIES: 8, Kind.TRUNCATES: 8,
    Kind.DIES: 6, Kind.OTHER_CORPUS: 2,
}  # fmt: skip
"""Of a hundred faults. A kill, a full disk and another corpus cost a start of the run each."""
AT_THE_RETRIEVER = tuple(kind for kind in Kind if kind.value.startswith("retriever"))
ON_THE_MACHINE = tuple(kind for kind in Kind if kind not in AT_THE_RETRIEVER)
SECONDS = {
    Kind.FREEZE: (0.2, 4.0), Kind.HANGS: (0.5, 6.0), Kind.DIES: (0.5, 5.0),
    Kind.OTHER_CORPUS: (2.0, 4.0),
}  # fmt: skip
"""How long a fault lasts, at least and at most; `SHORT` where nothing is said."""
SHORT = (0.2, 2.0)


@dataclass(frozen=True)
class Fault:
    """One fault of the plan."""

    number: int
    kind: Kind
    victim: Victim | None
    """Of a kill or a freeze."""
    moment: Moment
    delay: float
    """Seconds after the moment."""
    seconds: float
    """How long it lasts."""


def plan(num_faults: int, seed: int, kinds: Sequence[Kind], step_seconds: float) -> list[Fault]:
    """`num_faults` faults of `kinds` by their `SHARES`, at least one of each while they suffice.

    Each comes within two steps' time after a step has ended; a quarter of those on the machine come
    while a checkpoint is half written.
    """
    draw = random.Random(seed)
    total = sum(SHARES[kind] for kind in kinds)
    drawn = [kind for kind in kinds for _ in range(max(1, SHARES[kind] * num_faults // total))]
    while len(drawn) < num_faults:
        drawn += draw.choices(kinds, [SHARES[kind] for kind in kinds])
    draw.shuffle(drawn)
    drawn = list(dict.fromkeys(drawn)) + drawn if num_faults < len(drawn) else drawn
    return [_fault(number, kind, step_seconds, draw) for number, kind in
            enumerate(drawn[:num_faults], 1)]  # fmt: skip


def _fault(number: int, kind: Kind, step_seconds: float, draw: random.Random) -> Fault:
    victim = draw.choice(list(Victim)) if kind in (Kind.KILL, Kind.FREEZE) else None
    saving = kind in ON_THE_MACHINE and draw.random() < 0.25
    delay = draw.uniform(0, 0.2 if saving else 2 * step_seconds)
    moment = Moment.SAVING if saving else Moment.STEP
    seconds = draw.uniform(*SECONDS.get(kind, SHORT))
    return Fault(number, kind, victim, moment, delay, seconds)
