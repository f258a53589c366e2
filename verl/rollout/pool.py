"""Finishes started trajectories: what a request is, and what is sampled again.

Training steps, baselines and validation all sample through `RetryingRollout`, which samples failed
trajectories again and waits for tools that are unavailable. This module only probes the tools; it
does not know what they do.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from verl.agent.environment import Environment
from verl.agent.interface import Tool
from verl.errors import ToolOutage, ToolRefused
from verl.types import Metrics, Sampling, Status, Trajectory, TrajectoryKey

logger = logging.getLogger(__name__)

MAX_VAIN_ROUNDS = 3
"""Consecutive rounds without progress, although all tools answer, after which retrying stops."""
LINE_S = 30.0
"""Seconds between log lines while the run waits for a tool."""
PROBE_S = 30.0
"""Maximum seconds that one probe may take."""
POLL_S = 2.0
"""Seconds between two probes."""
COUNTS = ("trajectories_resampled", "trajectories_failed", "trajectories_dropped", "outage_s")
"""Fault counts of this module; trajectories add counts of their own."""

Check = Callable[[], None]


@dataclass(eq=False)
class RolloutRequest:
    """Started trajectories that engines are to finish."""

    starts: Sequence[Trajectory]
    sampling: Sampling
    finished: dict[int, Trajectory] = field(default_factory=dict)
    """Finished trajectories by their position in `starts`."""
    calls: dict[Any, tuple[int, list[int]]] = field(default_factory=dict)
    """Replica and positions of each pending call."""

    @property
    def replicas(self) -> dict[Any, int]:
        """The replica of each pending call."""
        return {call: replica for call, (replica, _) in self.calls.items()}

    @property
    def unfinished(self) -> list[int]:
        """Positions of the trajectories that are not finished."""
        return [i for i in range(len(self.starts)) if i not in self.finished]

    @property
    def trajectory_keys(self) -> list[TrajectoryKey]:
        """The key of each trajectory."""
        return trajectory_keys(self.starts)

    def in_order(self) -> list[Trajectory]:
        """Return all finished trajectories in the order of `starts`."""
        return [self.finished[i] for i in range(len(self.starts))]


def trajectory_keys(starts: Sequence[Trajectory]) -> list[TrajectoryKey]:
    """Return the key of each trajectory of a request."""
    return [(start.group, start.sample) for start in starts]


class RolloutPool:
    """Finishes trajectories. This base class calls `generate` when a request is finished."""

    sent: Mapping[str, float] = MappingProxyType({})
    """Metrics of the last transfer of weights, besides its seconds."""

    def start(
        self, starts: Sequence[Trajectory], sampling: Sampling,
        finished: Mapping[int, Trajectory] | None = None,
    ) -> RolloutRequest:  # fmt: skip
        """Start to finish `starts`, except for those `finished` (by position); return at once."""
        return RolloutRequest(starts, sampling, dict(finished or {}))

    def finish(self, request: RolloutRequest) -> list[Trajectory]:
        """Wait until all trajectories are finished; return them in the order of their starts."""
        unfinished = request.unfinished
        new = self.generate([request.starts[i] for i in unfinished], request.sampling)
        request.finished.update(zip(unfinished, new, strict=True))
        return request.in_order()

    def generate(self, starts: Sequence[Trajectory], sampling: Sampling) -> list[Trajectory]:
        """Finish `starts` and return them in the same order."""
        return self.finish(self.start(starts, sampling))

    def fetch_finished(self) -> Callable[[], Mapping[TrajectoryKey, Trajectory]]:
        """Ask for finished trajectories; returns a function that waits for them, in any thread."""
        return dict

    def abandon(self, request: RolloutRequest) -> None:
        """Drop a request whose trajectories are no longer needed."""

    def busy_share(self) -> float | None:
        """Return the share of time since the last call in which engines sampled, if known."""
        return None

    def sleep(self) -> None:
        """Free the engines' device memory for the training ranks."""


class NullRolloutPool(RolloutPool):
    """A pool without engines, for training on recorded trajectories."""

    def __init__(self, dtype: str) -> None:
        """`dtype`: the format in which the trained policy is written."""
        self.version, self.dtype = 0, dtype

    def update_weights(self, policy: object) -> dict[str, float]:
        """Count the version, to compare recorded ones with; no weights are transferred."""
        self.version += 1
        return {}

    def wake_up(self) -> None:
        """Do nothing: there are no engines."""

    def shutdown(self) -> None:
        """Do nothing: there are no engines."""


@dataclass
class Outage:
    """An outage of tools; it lasts from the first failed probe until trajectories finish again."""

    environment: Environment
    check: Check
    started: float | None = None
    """Start of the outage by `time.monotonic`; None while all tools answer."""

    def wait(self, num_failed: int) -> float:
        """Wait until all tools answer; return the seconds. Raises ToolOutage after `max_outage`."""
        entered, next_line, timeout = time.monotonic(), -math.inf, PROBE_S
        tool: Tool | None = None
        while failure := self.environment.probe(timeout):
            tool, problem = failure
            now = time.monotonic()
            self.started = entered if self.started is None else self.started
            elapsed = now - self.started
            if elapsed >= tool.max_outage:
                raise ToolOutage(
                    f"{tool.label} has been unavailable for {elapsed:.0f} s, no less than "
                    f"{tool.max_outage_option}={tool.max_outage:g} ({problem}); {tool.fix}"
                )
            if now >= next_line:
                logger.warning(
                    "%s has been unavailable for %.0f s (%s); the run waits for up to %.0f s more "
                    "(%s=%g) with %d trajectories to sample again; %s, and the run continues by "
                    "itself",
                    tool.label, elapsed, problem, tool.max_outage - elapsed, tool.max_outage_option,
                    tool.max_outage, num_failed, tool.fix,
                )  # fmt: skip
                next_line = now + LINE_S
            self.check()
            time.sleep(min(POLL_S, tool.max_outage - elapsed))
            left = tool.max_outage - (time.monotonic() - self.started)
            timeout = max(1.0, min(PROBE_S, left))  # at least 1 s, so that the probe can succeed
        if tool is None:
            return 0.0
        waited = time.monotonic() - entered
        logger.warning("%s answers again after %.0f s; the run continues", tool.label, waited)
        return waited


@dataclass
class RetryingRollout(RolloutPool):
    """Samples failed trajectories again, waits while tools are unavailable, and counts faults."""

    replicas: RolloutPool
    environment: Environment
    check: Check = lambda: None
    """Called while the run waits; may raise to end the run, for example when its time is over."""
    faults: Metrics = field(default_factory=lambda: defaultdict(float))
    expected_identity: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of what the tools served when the run began; empty disables the comparison."""

    def start(
        self, starts: Sequence[Trajectory], sampling: Sampling,
        finished: Mapping[int, Trajectory] | None = None,
    ) -> RolloutRequest:  # fmt: skip
        return self.replicas.start(starts, sampling, finished)

    def finish(self, request: RolloutRequest) -> list[Trajectory]:
        """Wait until all trajectories are finished; sample failed ones again from their start.

        Seeds are kept, so that the result is that of a run without faults. Only trajectories that
        fail although all tools answer are FAILED in the result. Raises ToolOutage when a tool has
        been unavailable for `max_outage` seconds, in which it may have answered now and then but no
        trajectory has finished, and ToolRefused when a tool refuses this run or serves something
        else than at the start of the run.
        """
        starts, sampling = request.starts, request.sampling
        trajectories = self._count_faults(self.replicas.finish(request))
        failed, vain_rounds = failed_positions(trajectories), 0
        outage = Outage(self.environment, self.check)
        while failed and vain_rounds < MAX_VAIN_ROUNDS:
            logger.warning("%d of %d trajectories failed and are sampled again: %s",
                           len(failed), len(starts), trajectories[failed[0]].error)  # fmt: skip
            waited = outage.wait(len(failed))
            retried = self.replicas.generate([starts[i] for i in failed], sampling)
            for i, trajectory in zip(failed, self._count_faults(retried), strict=True):
                trajectories[i] = trajectory
            self.faults["outage_s"] += waited
            self.faults["trajectories_resampled"] += len(failed)
            still_failed = failed_positions(trajectories)
            if len(still_failed) < len(failed):
                vain_rounds = 0
                outage = Outage(self.environment, self.check)
            elif waited == 0:
                vain_rounds += 1
            failed = still_failed
        self.faults["trajectories_failed"] += len(failed)
        self._check_identity()
        return trajectories

    def _check_identity(self) -> None:
        """Raise ToolRefused if a tool serves something else than when the run began."""
        expected = self.expected_identity  # otherwise a restart with another corpus goes unnoticed
        identity = self.environment.identity() if expected else {}
        changed = [name for name, value in identity.items() if expected.get(name, value) != value]
        if changed:
            raise ToolRefused(
                f"what the tools serve changed since the run began: got another "
                f"{', '.join(changed)}, expected the fingerprints of its start; fix: serve what "
                "was served before and resume, or begin a new run"
            )

    def fetch_finished(self) -> Callable[[], Mapping[TrajectoryKey, Trajectory]]:
        return self.replicas.fetch_finished()

    def abandon(self, request: RolloutRequest) -> None:
        self.replicas.abandon(request)

    def sleep(self) -> None:
        self.replicas.sleep()

    def take_faults(self) -> Metrics:
        """Return the metrics `fault/NAME` since the last call, including zeros, and reset them."""
        counts = {**dict.fromkeys(COUNTS, 0.0), **self.faults}
        self.faults.clear()
        return {f"fault/{name}": float(count) for name, count in counts.items()}

    def _count_faults(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        """Add the fault counts to `faults` and return the trajectories. Raises ToolRefused."""
        for trajectory in trajectories:
            if trajectory.is_refused:
                raise ToolRefused(f"{trajectory.prompt.uid}: {trajectory.error}")
            for name, count in trajectory.faults.items():
                self.faults[name] += count
        return trajectories


def failed_positions(trajectories: Iterable[Trajectory]) -> list[int]:
    """Return the positions of the trajectories that failed because of infrastructure."""
    return [i for i, t in enumerate(trajectories) if t.status is Status.FAILED]


def complete_groups(
    trajectories: Sequence[Trajectory], failed: Sequence[Trajectory], label: str, max_share: float
) -> list[Trajectory]:
    """Return the trajectories of all groups without a failure.

    A group with a failure is dropped as a whole: mostly trajectories that call tools fail, and the
    others alone would misrepresent the group. `label` names the trajectories in messages, as in
    `step 3`. Raises ToolOutage as `check_lost_share` does.
    """
    incomplete = {trajectory.group for trajectory in failed}
    kept = [t for t in trajectories if t.group not in incomplete]
    check_lost_share(failed, len(trajectories) - len(kept), len(trajectories), label, max_share)
    return kept


def check_lost_share(
    failed: Sequence[Trajectory], num_lost: int, num_total: int, label: str, max_share: float
) -> None:
    """Log the failed trajectories; raise ToolOutage if all or more than `max_share` are lost."""
    if not failed:
        return
    message = (
        f"{label}: {len(failed)} trajectories failed repeatedly although the tools answer, "
        f"the last ({failed[-1].prompt.uid}) with: {failed[-1].error}; {num_lost} of {num_total} "
        "are lost with them"
    )
    if num_lost / num_total > max_share or num_lost == num_total:
        allowed = f"{math.ceil(1000 * num_lost / num_total) / 1000:g}"
        allow = "" if num_lost == num_total else f", or allow it: trainer.max_lost_share={allowed}"
        raise ToolOutage(
            f"{message}, more than trainer.max_lost_share={max_share:g}; fix: correct the "
            f"cause of the failures{allow}"
        )
    logger.warning("%s", message)
