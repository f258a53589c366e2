"""`trainer.max_restarts`: a lost replica is replaced, and a lost rank restarts the run.

A replica has no state that cannot be recreated: its weights are in a folder that the ranks wrote or
are sent again, and each trajectory is determined by its prompt and seed. So after a loss, all
engines restart, load the current weights, and are sent the unfinished trajectories again. Ranks
have a state, of which the last checkpoint is the only copy: after a loss, everything starts again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.exceptions import RayTaskError

from verl.checkpoint import folders
from verl.config import Config
from verl.errors import RankLost, ReplicaLost, UserError
from verl.rollout.replicas import RolloutReplicas
from verl.rollout.rollouts import RolloutRequest, TrainedRollouts
from verl.single_controller.actors import RayWorkerGroup
from verl.single_controller.deaths import cause_of, lost_error
from verl.trainer.hooks import Hook
from verl.types import Metrics, Sampling, Trajectory, TrajectoryKey
from verl.weights.files import Ranks

if TYPE_CHECKING:
    from verl.trainer.groups import StartUp
    from verl.trainer.loop import RayPPOTrainer

logger = logging.getLogger(__name__)

HANG_TIMEOUT_S = 600.0
"""Time without a sign of life after which a rollout replica counts as dead."""

Result = TypeVar("Result")


def supervised(attempt: Callable[..., None]) -> Callable[[Config], None]:
    """Return a function that repeats `attempt`, called with options and what it starts with."""

    def run(config: Config) -> None:
        restarts = Restarts(config.trainer.max_restarts)
        restarts.supervise(lambda config: attempt(config, restarts.add_to), config)

    return run


@dataclass
class Restarts(Hook):
    """Counts restarts since the command began, of `trainer.max_restarts` (`allowed`)."""

    allowed: int
    of_replicas: int = 0
    of_run: int = 0

    def spend_on_replicas(self, error: UserError) -> None:
        """Count a restart of the engines; raises the error where no more are allowed."""
        self._spend(error, "all engines restart and repeat their requests")
        self.of_replicas += 1

    def spend_on_run(self, error: UserError, start: str) -> None:
        """Count a restart of the run from `start`; raises the error where no more are allowed."""
        self._spend(error, f"the run starts again from {start}")
        self.of_run += 1

    def metrics(self) -> dict[str, float]:
        """Return the counts so far."""
        counts = {"replica_restarts": self.of_replicas, "run_restarts": self.of_run}
        return {f"fault/{name}": float(count) for name, count in counts.items()}

    def on_trained(self, trainer: RayPPOTrainer, metrics: Metrics) -> None:
        """Add the counts to the step's metrics."""
        metrics |= self.metrics()

    def add_to(self, start_up: StartUp) -> None:
        """Replace the replicas of an attempt by those that restart, and count."""
        start_up.wrap = lambda replicas: self.of(replicas, start_up.clean_up)
        start_up.hooks.append(self)

    def _spend(self, error: UserError, consequence: str) -> None:
        spent = self.of_replicas + self.of_run
        if spent >= self.allowed:
            raise type(error)(
                f"{error}; the run ends, after {spent} of trainer.max_restarts={self.allowed} "
                "restarts: find out why, then continue with trainer.resume_mode=auto"
            ) from error
        count = f"restart {spent + 1} of trainer.max_restarts={self.allowed}"
        logger.warning("%s; %s (%s)", error, consequence, count)

    def supervise(self, attempt: Callable[[Config], None], config: Config) -> None:
        """Repeat `attempt` until one does not end by the loss of a rank or replica.

        Each attempt shuts down all its processes. The next one continues from the newest checkpoint
        that this command wrote, whatever `trainer.resume_mode` says, or, if there is none yet,
        starts as the first attempt did. Raises the last loss when restarts are used up, others at
        once.
        """
        root = Path(config.trainer.default_local_dir)
        times_before = checkpoint_times(root)
        while True:
            try:
                return attempt(config)
            except (RankLost, ReplicaLost) as error:
                times = checkpoint_times(root)
                new = [folder for folder in times if times_before.get(folder) != times[folder]]
                newest = max(new, key=folders.step_of, default=None)
                if newest is not None:
                    self.spend_on_run(error, str(newest))
                    trainer = replace(config.trainer, resume_mode=str(newest))
                    config = replace(config, trainer=trainer)
                elif config.trainer.resume_mode == "disable":
                    self.spend_on_run(error, "the beginning")
                else:
                    self.spend_on_run(error, "where it began")

    def of(
        self, replicas: RolloutReplicas, clean_up: Callable[[], object] | None = None
    ) -> RestartingReplicas:
        """Return replicas that restart; `clean_up` as there."""
        return RestartingReplicas(replicas, self, clean_up)


def checkpoint_times(root: Path) -> Mapping[Path, int]:
    """Return the complete checkpoints below `root` with the time of their markers, in ns."""
    complete = folders.all_complete(root)
    return {folder: (folder / folders.MARKER).stat().st_mtime_ns for folder in complete}


class RestartingReplicas(TrainedRollouts):
    """Replicas that are restarted when one is lost; what they had to do is repeated.

    Every method raises ReplicaLost if they do not start again, or `restarts` are used up.
    """

    def __init__(
        self, replicas: RolloutReplicas, restarts: Restarts,
        clean_up: Callable[[], object] | None = None, hang_timeout: float = HANG_TIMEOUT_S,
    ) -> None:  # fmt: skip
        """`clean_up`: called in each actor that takes the place of another, to end what is left.

        `hang_timeout`: seconds after which an engine that does not answer counts as lost.
        """
        self.replicas, self.restarts, self._clean_up = replicas, restarts, clean_up
        self.scores = replicas.scores
        replicas.new_check = lambda: Liveness(replicas.group, hang_timeout).check

    def start(
        self, starts: Sequence[Trajectory], sampling: Sampling,
        finished: Mapping[int, Trajectory] | None = None,
    ) -> RolloutRequest:  # fmt: skip
        return self.replicas.start(starts, sampling, finished)

    def finish(self, request: RolloutRequest) -> list[Trajectory]:
        return self._repeated(lambda: self.replicas.finish(request))

    def fetch_finished(self) -> Callable[[], Mapping[TrajectoryKey, Trajectory]]:
        return self.replicas.fetch_finished()

    def update_weights(self, ranks: Ranks, version: int) -> dict[str, float]:
        """As the replicas; the ranks send once more to engines that restarted meanwhile."""
        seconds = self._repeated(lambda: self.replicas.update_weights(ranks, version))
        self.sent = self.replicas.sent
        return seconds

    def sleep(self) -> None:
        self._repeated(self.replicas.sleep)

    def wake_up(self) -> None:
        self._repeated(self.replicas.wake_up)

    def call(self, method: str) -> Sequence[Any]:
        return self._repeated(lambda: self.replicas.call(method))

    def shutdown(self) -> None:
        self.replicas.shutdown()

    def _repeated(self, method: Callable[[], Result]) -> Result:
        """Call a method, again after each restart."""
        while True:
            try:
                return method()
            except ReplicaLost as lost:
                self.restarts.spend_on_replicas(lost)
                self._restart()

    def _restart(self) -> None:
        """Start new actors and engines, load the current weights if any, and send the requests."""
        replicas = self.replicas
        replicas.forget_calls()
        if replicas.empty_cache is not None:
            replicas.empty_cache()
        replace_actors(replicas.group, self._clean_up)
        try:
            replicas.group.gather(replicas.group.start_build(*replicas.group.built))
            replicas.group.call("engine.start_for_training")
            replicas.transport.resend(replicas)
            replicas.wait_until(lambda: not replicas.loads)
        except RayTaskError as error:
            raise ReplicaLost(f"the engines do not start again: {cause_of(error)}") from error
        for request in replicas.requests:
            replicas.submit(request)


def replace_actors(group: RayWorkerGroup, clean_up: Callable[[], object] | None) -> None:
    """Replace every actor of a group by an empty one, after cleaning up after the old ones.

    Raises the group's error if an actor can no longer be placed.
    """
    for host in group.hosts:
        ray.kill(host)
    group.start()
    if clean_up is not None:
        group.run(clean_up)
    group.known_locations = []
    group.locations()


class Liveness:
    """Probes busy replicas' engines, which answer even during long dialogues and tool outages."""

    def __init__(self, group: RayWorkerGroup, hang_timeout: float) -> None:
        self._group, self._hang_timeout = group, hang_timeout
        self._probes = [group.submit(i, "engine.probe") for i in range(len(group))]
        self._answered_at = [time.monotonic()] * len(group)

    def check(self) -> None:
        """Raise ReplicaLost if a replica died or has not answered within the timeout."""
        now = time.monotonic()
        for i, probe in enumerate(self._probes):
            if self._group.is_done(probe):
                self._group.poll({probe: i})  # raises if the probe failed
                self._answered_at[i] = now
                self._probes[i] = self._group.submit(i, "engine.probe")
            elif now - self._answered_at[i] > self._hang_timeout:
                cause = f"no sign of life for {self._hang_timeout:.0f} s"
                raise lost_error(self._group, i, cause)
