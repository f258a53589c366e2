"""Replicas that sample while the ranks train, for `verl.ext.asynchrony`.

Their actors host the replicas of `verl.ext.gated`.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ray.exceptions import RayError

from verl.config import Config
from verl.errors import ConfigError, UserError, explain
from verl.rollout.replicas import RolloutReplicas
from verl.single_controller.actors import RayWorkerGroup
from verl.trainer.groups import StartUp
from verl.types import Sampling, Trajectory, TrajectoryKey
from verl.weights.files import Ranks, Transport

FETCH_TIMEOUT_S = 30.0
"""Seconds to wait for the replicas to report their finished trajectories."""


def add_to(start_up: StartUp) -> None:
    """Check where engines are."""
    start_up.checks.append(check_engines_apart)


def replicas_class(config: Config) -> type[OverlappingReplicas] | None:
    """Return the driver's side of engines that never wait."""
    return OverlappingReplicas if config.actor_rollout_ref.rollout.max_staleness > 0 else None


def check_engines_apart(config: Config, nodes: Mapping[str, str]) -> None:
    """Raise ConfigError if engines are to sample while their GPUs train."""
    key = "actor_rollout_ref.rollout.max_staleness"
    got, shares = config.actor_rollout_ref.rollout.max_staleness, config.placement.is_colocated
    if got and shares and config.trainer.device == "cuda":
        expected = "0: engines share the ranks' GPUs"
        fix = "give engines their own GPUs: trainer.rollout_gpus=N and fewer n_gpus_per_node"
        raise ConfigError(explain(key, got, expected, fix))


class OverlappingReplicas(RolloutReplicas):
    """Replicas that load new weights when they can, while nobody waits for them.

    They sample with the weights of a request's start, or with later ones, and never sleep.
    """

    def __init__(
        self, group: RayWorkerGroup, transport: Transport,
        empty_cache: Callable[[], object] | None = None,
    ) -> None:  # fmt: skip
        self._num_calls: Counter[int] = Counter()
        """Number of `rollout` calls to each replica since it was started."""
        super().__init__(group, transport)

    def sample(self, replica: int, starts: Sequence[Trajectory], sampling: Sampling) -> Any:
        self._num_calls[replica] += 1
        return self.group.submit(replica, "rollout", starts, sampling, self.version)

    def update_weights(self, ranks: Ranks, version: int) -> dict[str, float]:
        """Send weights; at most one earlier version may still be loading then."""
        start = time.perf_counter()
        self.wait_until(lambda: len(self.loading) <= 1)
        waited = time.perf_counter() - start
        seconds = self.transport.send(ranks, self, version)
        self.version, self.sent = version, self.transport.metrics
        return {**seconds, "wait": waited + seconds.get("wait", 0.0), "load": 0.0}

    def pause(self, version: int) -> None:
        self.call("pause", lambda replica: (version, self._num_calls[replica]))

    def load(self, sources: Sequence[str], version: int) -> None:
        for replica, source in enumerate(sources):
            arguments = source, version, self.scores.ids, self._num_calls[replica]
            self.loads[self.group.submit(replica, "update_weights", *arguments)] = replica, version

    def forget_calls(self) -> None:
        super().forget_calls()
        self._num_calls.clear()

    def fetch_finished(self) -> Callable[[], Mapping[TrajectoryKey, Trajectory]]:
        """Store the results of completed calls, and ask for finished trajectories of pending calls.

        A call returns only with its slowest trajectory. Replicas that are lost or do not answer are
        ignored here; `finish` raises for them.
        """
        for request in self.requests:
            for call, replica in request.replicas.items():
                if self.group.is_done(call):
                    with contextlib.suppress(UserError, RayError):
                        request.store(call, self.group.poll({call: replica})[call])
        calls = {self.group.submit(i, "finished"): i for i in range(len(self.group))}
        end = time.monotonic() + FETCH_TIMEOUT_S

        def wait() -> dict[TrajectoryKey, Trajectory]:
            finished: dict[TrajectoryKey, Trajectory] = {}
            with contextlib.suppress(UserError, RayError):
                while calls and time.monotonic() < end:
                    for call, trajectories in self.group.poll(calls).items():
                        finished |= trajectories
                        del calls[call]
            return finished

        return wait
