"""Rollouts without engines, for tests."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from verl.rollout.rollouts import RolloutRequest, Scores, TrainedRollouts
from verl.types import Sampling, Trajectory


class InstantRollouts(TrainedRollouts):
    """Finishes a request by `generate`, at the moment when its result is asked for."""

    version, scores = 0, Scores()
    sent: Mapping[str, float] = MappingProxyType({})

    def start(
        self, starts: Sequence[Trajectory], sampling: Sampling,
        finished: Mapping[int, Trajectory] | None = None,
    ) -> RolloutRequest:  # fmt: skip
        return RolloutRequest(starts, sampling, dict(finished or {}))

    def finish(self, request: RolloutRequest) -> list[Trajectory]:
        unfinished = request.unfinished
        new = self.generate([request.starts[i] for i in unfinished], request.sampling)
        request.finished.update(zip(unfinished, new, strict=True))
        return request.in_order()

    def update_weights(self, policy: object, version: int) -> dict[str, float]:
        self.version = version
        return {"gather": 0.0, "write": 0.0, "load": 0.0}

    def sleep(self) -> None: ...

    def wake_up(self) -> None: ...

    def call(self, method: str) -> list[object]:
        return []

    def shutdown(self) -> None: ...
