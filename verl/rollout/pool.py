"""Trajectories on their way: who finishes them, which replica which, and what is sampled again.

All replicas are given a whole request. Each claims the next group that nobody has taken, as often
as it has room, so that a replica whose dialogues are short does not wait for another's long ones.

Whatever samples trajectories (a step, a baseline, validation) does it through `RetryingRollout`:
broken ones are sampled again, an outage of a tool is waited for. It asks the tools whether they
answer: nothing here knows what they do.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.agent.environment import Environment
from verl.agent.interface import Tool
from verl.errors import ToolOutage, ToolRefused
from verl.types import Metrics, Sampling, Status, Trajectory, TrajectoryKey

logger = logging.getLogger(__name__)

MAX_VAIN_ROUNDS = 3
"""Rounds in a row that finish nothing though all tools answer: what fails then has failed."""
LINE_S = 30.0
"""Seconds between the lines that say that the run waits."""
PROBE_S = 30.0
"""Longest that one probe may take."""
POLL_S = 2.0
"""Pause between two probes."""
COUNTS = ("trajectories_resampled", "trajectories_failed", "trajectories_dropped", "outage_s")
"""What is counted here, beside what trajectories count themselves."""

Check = Callable[[], None]


@dataclass(eq=False)
class RolloutRequest:
    """Started trajectories that engines are finishing."""

    starts: Sequence[Trajectory]
    sampling: Sampling
    finished: dict[int, Trajectory] = field(default_factory=dict)
    """By position in `starts`."""
    calls: dict[Any, int] = field(default_factory=dict)
    """The replica of each call that is not answered yet."""

    @property
    def left(self) -> list[int]:
        """Positions of those that are not finished."""
        return [i for i in range(len(self.starts)) if i not in self.finished]

    @property
    def trajectory_keys(self) -> list[TrajectoryKey]:
        """Of each start."""
        return trajectory_keys(self.starts, self.sampling)

    def in_order(self) -> list[Trajectory]:
        """All of them, finished, in the order of `starts`."""
        return [self.finished[i] for i in range(len(self.starts))]


def trajectory_keys(starts: Sequence[Trajectory], sampling: Sampling) -> list[TrajectoryKey]:
    """What the trajectories of one request are known by."""
    return [(start.group, start.sample, sampling.temperature == 0) for start in starts]


class RolloutPool:
    """Whatever finishes trajectories; this one does it when they are taken."""

    def start(
        self, starts: Sequence[Trajectory], sampling: Sampling,
        finished: Mapping[int, Trajectory] | None = None,
    ) -> RolloutRequest:  # fmt: skip
        """Begin to finish `starts`, and return at once; some, by position, may be `finished`."""
        return RolloutRequest(starts, sampling, dict(finished or {}))

    def finish(self, request: RolloutRequest) -> list[Trajectory]:
        """Wait until all are finished; they come in the order of their starts."""
        left = request.left
        new = self.generate([request.starts[i] for i in left], request.sampling)
        request.finished.update(zip(left, new, strict=True))
        return request.in_order()

    def generate(self, starts: Sequence[Trajectory], sampling: Sampling) -> list[Trajectory]:
        """Finish `starts`, in their order."""
        return self.finish(self.start(starts, sampling))

    def fetch_finished(self) -> Callable[[], Mapping[TrajectoryKey, Trajectory]]:
        """Ask for the finished trajectories of unfinished requests.

        Returns a function that waits for them; it may be called in another thread.
        """
        return dict

    def abandon(self, request: RolloutRequest) -> None:
        """Nobody waits for these any more."""

    def busy_share(self) -> float | None:
        """The share of the time since the last call in which an engine sampled, where known."""
        return None

    def sleep(self) -> None:
        """Give the devices' memory to the training ranks."""


Ask = Callable[[str, int, int], Awaitable[int]]
"""Calls `claim(request, number)` of the replica that counts what is taken."""


@dataclass(frozen=True)
class Claims:
    """What one replica may finish of a request: `groups` of positions, each begun as a whole."""

    groups: Sequence[Sequence[int]]
    most: float = math.inf
    """Of a request's trajectories, how many a replica begins before some have ended: its share."""
    request_id: int = 0
    ask: Ask | None = None
    """None where all `groups` are this replica's own."""

    @property
    def own(self) -> list[int]:
        """What no other replica may take."""
        return [] if self.ask else [i for group in self.groups for i in group]

    async def take(
        self, room: Slots, num_begun: Callable[[], int], begin: Callable[[Sequence[int]], None]
    ) -> None:
        """Have positions begun until all are taken: as many as there is `room` for, which is waited
        for, but one group at least. `num_begun` are those that have not ended.

        An earlier request goes first, unless it has begun its share.
        """
        if self.ask is None:
            begin(self.own)
            return
        largest = max(map(len, self.groups), default=1)
        first = 0
        room.open[self.request_id] = lambda: num_begun() < self.most
        try:
            while first < len(self.groups):
                while room.left <= 0 or room.next_request() != self.request_id:
                    await room.changed()
                number = max(1, int(min(room.left, self.most - num_begun()) // largest))
                first = await self.ask("claim", self.request_id, number)
                begin([i for group in self.groups[first : first + number] for i in group])
                await asyncio.sleep(0)  # until each has begun, and taken its room
        finally:
            del room.open[self.request_id]
            room.change(0)


class Slots:
    """How much of a replica is taken: by turns, and by trajectories that are yet to begin one.

    One that waits for a tool takes none, so that engines have enough to do however slow tools are.
    """

    def __init__(self, size: float = math.inf) -> None:
        self.left = size
        """Trajectories that may begin; below 0 where tools have answered meanwhile."""
        self.open: dict[int, Callable[[], bool]] = {}
        """Requests of which some may be left to take: whether it has not begun its share."""
        self._changed = asyncio.Event()

    def change(self, by: int) -> None:
        """So many more may begin; wakes who waits, also by 0."""
        self.left += by
        self._changed.set()

    def next_request(self) -> int | None:
        """The earliest that may begin more."""
        return min((request for request, wants in self.open.items() if wants()), default=None)

    async def changed(self) -> None:
        """Wait until something ends."""
        self._changed.clear()
        await self._changed.wait()


class NullRolloutPool(RolloutPool):
    """Takes no weights, and counts their versions all the same: those of the record are held
    against them. It is asked for no trajectory."""

    def __init__(self, dtype: str) -> None:
        """`dtype`: the format in which the trained policy is written."""
        self.version, self.dtype = 0, dtype

    def update_weights(self, policy: object) -> dict[str, float]:
        """Nobody waits for them."""
        self.version += 1
        return {}

    def wake_up(self) -> None:
        """Nothing sleeps."""

    def shutdown(self) -> None:
        """Nothing runs."""


@dataclass
class Outage:
    """The time from when a tool is found away until trajectories finish again."""

    environment: Environment
    check: Check
    began: float | None = None
    """A time of `time.monotonic`; None while all tools answered."""

    def wait(self, num_failed: int) -> float:
        """Until all tools answer; the seconds waited, 0 where they answered at once.

        Raises ToolOutage when one has been away for too long.
        """
        entered, next_line = time.monotonic(), -math.inf
        tool: Tool | None = None
        while found := self.environment.probe(self._probe_seconds(tool, entered)):
            tool, problem = found
            now = time.monotonic()
            self.began = entered if self.began is None else self.began
            away = now - self.began
            if away >= tool.max_outage:
                raise ToolOutage(
                    f"{tool.label} has been away for {away:.0f} s, no less than "
                    f"{tool.max_outage_option}={tool.max_outage:g} ({problem}); {tool.fix}"
                )
            if now >= next_line:
                logger.warning(
                    "%s is away since %.0f s (%s); the run waits for up to %.0f s more (%s=%g) "
                    "with %d trajectories to sample again; %s, and the run goes on by itself",
                    tool.label, away, problem, tool.max_outage - away, tool.max_outage_option,
                    tool.max_outage, num_failed, tool.fix,
                )  # fmt: skip
                next_line = now + LINE_S
            self.check()
            time.sleep(min(POLL_S, tool.max_outage - away))
        if tool is None:
            return 0.0
        waited = time.monotonic() - entered
        logger.warning("%s answers again after %.0f s; the run goes on", tool.label, waited)
        return waited

    def _probe_seconds(self, tool: Tool | None, entered: float) -> float:
        """How long the next probe may take: at least a second, so that it can be answered."""
        if tool is None:
            return PROBE_S
        began = entered if self.began is None else self.began
        left = tool.max_outage - (time.monotonic() - began)
        return max(1.0, min(PROBE_S, left))


@dataclass
class RetryingRollout(RolloutPool):
    """Finishes trajectories, however often tools fail meanwhile, and counts how often."""

    replicas: RolloutPool
    environment: Environment
    check: Check = lambda: None
    """Called while the run waits; may raise to end it, as when its time is over."""
    faults: Metrics = field(default_factory=lambda: defaultdict(float))
    expected_identity: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of what the tools served when the run began; empty compares nothing."""

    def start(
        self, starts: Sequence[Trajectory], sampling: Sampling,
        finished: Mapping[int, Trajectory] | None = None,
    ) -> RolloutRequest:  # fmt: skip
        """Begin to finish `starts`, and return at once; some, by position, may be `finished`."""
        return self.replicas.start(starts, sampling, finished)

    def finish(self, request: RolloutRequest) -> list[Trajectory]:
        """Wait until all are finished; one that failed is sampled again as it was started.

        Seeds stay, so that the result is that of an undisturbed run. FAILED in the end are only
        those that fail though all tools answer. Raises ToolOutage when one stays away for its
        `max_outage` seconds, or comes back for nothing that long, and ToolRefused when one refuses
        this run, or serves something else than when it began.
        """
        starts, sampling = request.starts, request.sampling
        finished = self._noted(self.replicas.finish(request))
        failed, vain_rounds = failed_positions(finished), 0
        outage = Outage(self.environment, self.check)
        while failed and vain_rounds < MAX_VAIN_ROUNDS:
            logger.warning("%d of %d trajectories failed and are to be sampled again: %s",
                           len(failed), len(starts), finished[failed[0]].error)  # fmt: skip
            waited = outage.wait(len(failed))
            again = self.replicas.generate([starts[i] for i in failed], sampling)
            for i, trajectory in zip(failed, self._noted(again), strict=True):
                finished[i] = trajectory
            self.faults["outage_s"] += waited
            self.faults["trajectories_resampled"] += len(failed)
            still = failed_positions(finished)
            if len(still) < len(failed):
                vain_rounds, outage = 0, Outage(self.environment, self.check)
            else:
                vain_rounds += int(waited == 0)
            failed = still
        self.faults["trajectories_failed"] += len(failed)
        self._refuse_another_service()
        return finished

    def _refuse_another_service(self) -> None:
        """Raise ToolRefused where a tool serves something else than when the run began.

        A server that was started again with another corpus answers as well as the first.
        """
        found = self.environment.identity() if self.expected_identity else {}
        changed = [
            name for name in found if self.expected_identity.get(name, found[name]) != found[name]
        ]
        if changed:
            raise ToolRefused(
                f"what the tools serve changed since the run began: got another "
                f"{', '.join(changed)}, expected the fingerprints of its start; fix: serve what "
                "was served before and resume, or begin a new run"
            )

    def fetch_finished(self) -> Callable[[], Mapping[TrajectoryKey, Trajectory]]:
        """Ask for what is finished of requests that are not; see `RolloutPool`."""
        return self.replicas.fetch_finished()

    def abandon(self, request: RolloutRequest) -> None:
        """Nobody waits for these any more."""
        self.replicas.abandon(request)

    def sleep(self) -> None:
        """Nothing is to be sampled for a while: give the devices' memory to the training ranks."""
        self.replicas.sleep()

    def take_faults(self) -> Metrics:
        """`fault/NAME` of all since the last call, zeros included."""
        found = {**dict.fromkeys(COUNTS, 0.0), **self.faults}
        self.faults.clear()
        return {f"fault/{name}": float(count) for name, count in found.items()}

    def _noted(self, finished: list[Trajectory]) -> list[Trajectory]:
        """Those of one round; what went wrong is counted, whatever becomes of them."""
        for trajectory in finished:
            if trajectory.is_refused:
                raise ToolRefused(f"{trajectory.prompt.uid}: {trajectory.error}")
            for name, count in trajectory.faults.items():
                self.faults[name] += count
        return finished


def failed_positions(trajectories: Iterable[Trajectory]) -> list[int]:
    """Positions of those that infrastructure broke."""
    return [i for i, t in enumerate(trajectories) if t.status is Status.FAILED]


def complete_groups(
    trajectories: Sequence[Trajectory], failed: Sequence[Trajectory], of_what: str, max_share: float
) -> list[Trajectory]:
    """Those whose group is whole; a group of which one is in `failed` goes with it.

    What failed is mostly what called a tool: its siblings that did without must not stand for the
    group. `of_what` names all of them: `step 3`. Raises ToolOutage as `check_lost_share` does.
    """
    cut = {trajectory.group for trajectory in failed}
    kept = [t for t in trajectories if t.group not in cut]
    check_lost_share(failed, len(trajectories) - len(kept), len(trajectories), of_what, max_share)
    return kept


def check_lost_share(
    failed: Sequence[Trajectory], num_lost: int, num_all: int, of_what: str, max_share: float
) -> None:
    """A line for what failed for good, with which `num_lost` of `num_all` are lost.

    Raises ToolOutage where that is more than `max_share` of them, or all.
    """
    if not failed:
        return
    told = (
        f"{of_what}: {len(failed)} trajectories failed again and again though the tools answer, "
        f"the last ({failed[-1].prompt.uid}) with: {failed[-1].error}; {num_lost} of {num_all} are "
        "lost with them"
    )
    if num_lost / num_all > max_share or num_lost == num_all:
        enough = f"{math.ceil(1000 * num_lost / num_all) / 1000:g}"
        allow = "" if num_lost == num_all else f", or allow it: trainer.max_lost_share={enough}"
        raise ToolOutage(
            f"{told}, more than trainer.max_lost_share={max_share:g}; fix: mend what fails{allow}"
        )
    logger.warning("%s", told)
