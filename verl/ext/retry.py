"""Samples failed trajectories again, and waits for tools that are unavailable.

This module only probes the tools; it does not know what they do.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from verl.agent.environment import Environment
from verl.agent.interface import Tool
from verl.agent.served import fingerprints, unavailable
from verl.errors import ToolOutage, ToolRefused
from verl.rollout.rollouts import RolloutRequest, Rollouts
from verl.types import Sampling, Status, Trajectory

if TYPE_CHECKING:
    from verl.trainer.build import Parts

logger = logging.getLogger(__name__)

MAX_VAIN_ROUNDS = 3
"""Consecutive rounds without progress, although all tools answer, after which retrying stops."""
LINE_S = 30.0
"""Seconds between log lines while the run waits for a tool."""
PROBE_S = 30.0
"""Maximum seconds that one probe may take."""
POLL_S = 2.0
"""Seconds between two probes."""

Check = Callable[[], None]


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
        while failure := unavailable(self.environment, timeout):
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
class RetryingRollout(Rollouts):
    """Samples failed trajectories again, and waits while tools are unavailable.

    The faults of a trajectory's earlier attempts, their number and the seconds of waiting are added
    to the faults of its last one.
    """

    rollouts: Rollouts
    environment: Environment
    check: Check = lambda: None
    """Called while the run waits; may raise to end the run, for example when its time is over."""
    expected_identity: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of what the tools served when the run began; empty disables the comparison."""

    def start(
        self, starts: Sequence[Trajectory], sampling: Sampling,
        finished: Mapping[int, Trajectory] | None = None,
    ) -> RolloutRequest:  # fmt: skip
        return self.rollouts.start(starts, sampling, finished)

    def finish(self, request: RolloutRequest) -> list[Trajectory]:
        """Wait until all trajectories are finished; sample failed ones again from their start.

        Seeds are kept, so that the result is that of a run without faults. Only trajectories that
        fail although all tools answer are FAILED in the result. Raises ToolOutage when a tool has
        been unavailable for `max_outage` seconds, in which it may have answered now and then but no
        trajectory has finished, and ToolRefused when a tool refuses this run or serves something
        else than at the start of the run.
        """
        starts, sampling = request.starts, request.sampling
        trajectories = accepted(self.rollouts.finish(request))
        failed, vain_rounds = failed_positions(trajectories), 0
        outage = Outage(self.environment, self.check)
        while failed and vain_rounds < MAX_VAIN_ROUNDS:
            logger.warning("%d of %d trajectories failed and are sampled again: %s",
                           len(failed), len(starts), trajectories[failed[0]].error)  # fmt: skip
            waited = outage.wait(len(failed))
            retried = self.rollouts.generate([starts[i] for i in failed], sampling)
            for i, trajectory in zip(failed, accepted(retried), strict=True):
                add_faults(trajectory, trajectories[i].faults)
                add_faults(trajectory, {"trajectories_resampled": 1})
                trajectories[i] = trajectory
            add_faults(trajectories[failed[0]], {"outage_s": waited})
            still_failed = failed_positions(trajectories)
            if len(still_failed) < len(failed):
                vain_rounds = 0
                outage = Outage(self.environment, self.check)
            elif waited == 0:
                vain_rounds += 1
            failed = still_failed
        self._check_identity()
        return trajectories

    def sleep(self) -> None:
        self.rollouts.sleep()

    def _check_identity(self) -> None:
        """Raise ToolRefused if a tool serves something else than when the run began."""
        expected = self.expected_identity  # otherwise a restart with another corpus goes unnoticed
        identity = fingerprints(self.environment) if expected else {}
        changed = [name for name, value in identity.items() if expected.get(name, value) != value]
        if changed:
            raise ToolRefused(
                f"what the tools serve changed since the run began: got another "
                f"{', '.join(changed)}, expected the fingerprints of its start; fix: serve what "
                "was served before and resume, or begin a new run"
            )


def failed_positions(trajectories: Iterable[Trajectory]) -> list[int]:
    """Return the positions of the trajectories that failed because of infrastructure."""
    return [i for i, t in enumerate(trajectories) if t.status is Status.FAILED]


def add_faults(trajectory: Trajectory, faults: Mapping[str, float]) -> None:
    """Add counts to those of a trajectory."""
    own = trajectory.faults
    trajectory.faults = {n: own.get(n, 0) + faults.get(n, 0) for n in (*own, *faults)}


def accepted(trajectories: list[Trajectory]) -> list[Trajectory]:
    """Return the trajectories. Raises ToolRefused if a tool refused one of them."""
    for trajectory in trajectories:
        if trajectory.failure is not None and trajectory.failure.is_final:
            raise ToolRefused(f"{trajectory.prompt.uid}: {trajectory.error}")
    return trajectories


def retrying(rollouts: Rollouts, parts: Parts) -> RetryingRollout:
    """Return what samples in the place of `rollouts`; hooks may end the run while it waits."""
    expected = parts.inputs.record.get("fingerprints", {})
    return RetryingRollout(rollouts, parts.inputs.environment, parts.on_wait, expected)
