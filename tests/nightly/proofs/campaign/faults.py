"""The kinds of faults, and a plan of faults drawn from a seed before the run starts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from tests.nightly.proofs.kills.schedule import Moment, Victim


class Kind(StrEnum):
    """A fault of a run, or of a service that it depends on."""

    KILL = "SIGKILL"
    FREEZE = "SIGSTOP"
    DISK_FULL = "disk full"
    READ_ONLY = "permission lost"
    CLOCK = "clock jumps"
    NODE_OFF = "node loses power"
    NODE_CUT = "node is cut off"
    REFUSES = "retriever answers 503"
    RESETS = "retriever drops connections"
    HANGS = "retriever hangs"
    GARBAGE = "retriever answers garbage"
    LIES = "retriever answers too few results"
    TRUNCATES = "retriever stops in mid-answer"
    DIES = "retriever dies"
    OTHER_CORPUS = "retriever comes back with another corpus"


SHARES = {
    Kind.KILL: 8, Kind.FREEZE: 12, Kind.DISK_FULL: 4, Kind.READ_ONLY: 4, Kind.CLOCK: 8,
    Kind.REFUSES: 12, Kind.RESETS: 12, Kind.HANGS: 8, Kind.GARBAGE: 10, Kind.LIES: 8,
    Kind.TRUNCATES: 8, Kind.DIES: 5, Kind.OTHER_CORPUS: 1, Kind.NODE_OFF: 1, Kind.NODE_CUT: 1,
}  # fmt: skip
"""Weight of each kind. A kill, a full disk, another corpus and a lost node cost a start each."""
AT_THE_RETRIEVER = tuple(kind for kind in Kind if kind.value.startswith("retriever"))
OF_A_NODE = tuple(kind for kind in Kind if kind.value.startswith("node"))
ON_THE_MACHINE = tuple(kind for kind in Kind if kind not in AT_THE_RETRIEVER + OF_A_NODE)
SECONDS = {
    Kind.FREEZE: (0.2, 4.0), Kind.HANGS: (0.5, 6.0), Kind.DIES: (0.5, 5.0), Kind.CLOCK: (0.5, 4.0),
    Kind.NODE_OFF: (1.0, 10.0), Kind.NODE_CUT: (6.0, 15.0),
}  # fmt: skip
"""Minimum and maximum seconds of a fault; `SHORT` for all other kinds."""
SHORT = (0.2, 2.0)


@dataclass(frozen=True)
class Fault:
    """A planned fault."""

    number: int
    kind: Kind
    victim: Victim | None
    """The victim of a kill or a freeze."""
    moment: Moment
    delay: float
    """Seconds after the moment."""
    seconds: float
    """Duration of the fault."""


def plan(num_faults: int, seed: int, kinds: Sequence[Kind], step_seconds: float) -> list[Fault]:
    """Plan faults of `kinds` by their `SHARES`, with each kind at least once if there are enough.

    Faults of the retriever follow one another immediately. The others come after the end of a step,
    a quarter of those of the machine while a checkpoint is half written.
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
    moment = Moment.START if kind in AT_THE_RETRIEVER else Moment.STEP
    if kind is Kind.OTHER_CORPUS:
        moment = Moment.STEP  # it ends the run, which must be running again before the next fault
    if kind in ON_THE_MACHINE and draw.random() < 0.25:
        moment = Moment.SAVING
    delay = draw.uniform(0, 0.2 if moment is Moment.SAVING else step_seconds)
    return Fault(number, kind, victim, moment, delay, draw.uniform(*SECONDS.get(kind, SHORT)))
