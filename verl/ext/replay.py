"""Records which weights sampled each turn of a run, so that another run can repeat it.

A run with `rollout.max_staleness` writes one JSONL file per step to the folder `schedule/`, with
one line for each trajectory that the step took. With `rollout.replay`, another run of the same
options samples every turn with the version that sampled it then, independently of timing.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

from verl.config import Config
from verl.errors import ConfigError, explain
from verl.ext.gated import GatedReplica, TurnKey, WeightGate
from verl.files import atomic_write
from verl.types import Origin, Trajectory, TrajectoryKey

logger = logging.getLogger(__name__)

FOLDER = "schedule"
REPLAY = "actor_rollout_ref.rollout.replay"


class ScheduleEntry(BaseModel, frozen=True):
    """The record of one trajectory; a line of the file."""

    group: str
    sample: int
    replica: int
    versions: tuple[int, ...]
    """Version that sampled each turn."""
    cuts: tuple[()] = Field(default=(), exclude=True)
    """Turns that new weights interrupted, in earlier schedules: they cannot be repeated."""


def entry_of(trajectory: Trajectory) -> ScheduleEntry:
    """Return the record of a trajectory."""
    return ScheduleEntry(
        group=trajectory.group, sample=trajectory.sample, replica=trajectory.timeline.replica,
        versions=tuple(s.weight_version for s in trajectory.segments if s.origin is Origin.POLICY),
    )  # fmt: skip


def write(directory: Path, step: int, entries: Iterable[ScheduleEntry]) -> None:
    """Write the entries of a step; replaces the file of a step that is run again."""
    folder = directory / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / f"step_{step:08d}.jsonl") as file:
        file.write_text("".join(entry.model_dump_json() + "\n" for entry in entries))


def read(folder: Path) -> Iterator[ScheduleEntry]:
    """Yield all entries of a schedule folder. Raises ConfigError."""
    files = sorted(folder.glob("step_*.jsonl"))
    if not files:
        expected, fix = f"the folder {FOLDER} of a run", f"name RUN/{FOLDER}, or leave it out"
        raise ConfigError(explain(REPLAY, f"{folder}, without step_*.jsonl", expected, fix))
    for path in files:
        try:
            for line in path.read_text(encoding="utf-8").splitlines():
                yield ScheduleEntry.model_validate_json(line)
        except (OSError, ValueError) as error:
            problem = str(error).splitlines()[0]
            if isinstance(error, ValidationError):
                problem = error.errors()[0]["msg"]
            raise ConfigError(explain(REPLAY, f"{path}: {problem}", "the schedule of a run",
                                      "name the folder of a run")) from error  # fmt: skip


class Schedule:
    """The recorded turns of a run, and which of them a replica still has to sample."""

    def __init__(self, entries: Iterable[ScheduleEntry]) -> None:
        self._versions = {
            (entry.group, entry.sample, turn): version
            for entry in entries
            for turn, version in enumerate(entry.versions)
        }
        self._pending: dict[TurnKey, int] = {}
        """Versions of the turns that running trajectories still have to sample."""

    def version(self, turn: TurnKey) -> int | None:
        """Return the version that sampled a turn; None if it was not recorded."""
        return self._versions.get(turn)

    def start(self, key: TrajectoryKey) -> None:
        """Note that a trajectory starts: all of its turns are pending."""
        self._pending |= {turn: self._versions[turn] for turn in self._turns(key)}

    def mark_done(self, turn: TurnKey) -> None:
        """Note that a turn was sampled, or failed."""
        self._pending.pop(turn, None)

    def finish(self, key: TrajectoryKey) -> None:
        """Note that a trajectory has finished, possibly with fewer turns than recorded."""
        for turn in self._turns(key):
            self.mark_done(turn)

    def is_done_before(self, version: int) -> bool:
        """Whether no turn of weights older than `version` is pending."""
        return all(other >= version for other in self._pending.values())

    def _turns(self, key: TrajectoryKey) -> Iterator[TurnKey]:
        """Yield the recorded turns of a trajectory."""
        turns = ((*key, number) for number in itertools.count())
        return itertools.takewhile(self._versions.__contains__, turns)


class ReplayGate(WeightGate):
    """Repeats a schedule: turns wait for the weights that it names.

    A change waits for the scheduled turns of older weights, which take precedence over it. Only
    turns of registered trajectories are waited for: turns of others may never come.
    """

    def __init__(self, schedule: Schedule) -> None:
        super().__init__()
        self._schedule = schedule

    def register(self, keys: Iterable[TrajectoryKey]) -> None:
        for key in keys:
            self._schedule.start(key)
        super().register(keys)

    def finish(self, key: TrajectoryKey) -> None:
        self._schedule.finish(key)
        super().finish(key)

    @contextlib.asynccontextmanager
    async def sampling(
        self, min_version: int = 0, turn: TurnKey | None = None
    ) -> AsyncIterator[None]:
        """As the base class; the current weights are used if the turn's own are gone.

        That is so after a resume, for example.
        """
        async with super().sampling(min_version, turn):
            planned = self._planned(turn)
            if planned is not None and planned < self.version:
                logger.warning("%s was sampled by version %d, which is gone: from here on the run "
                               "differs from the recorded one", turn, planned)  # fmt: skip
            try:
                yield
            finally:
                if turn is not None:
                    self._schedule.mark_done(turn)

    def must_wait(self, min_version: int, turn: TurnKey | None) -> bool:
        planned = self._planned(turn)
        if planned is None:
            return super().must_wait(min_version, turn)
        return self._is_loading or self.version < planned

    def must_wait_for_turns(self, version: int, num_calls: int) -> bool:
        return self._num_calls < num_calls or not self._schedule.is_done_before(version)

    def _planned(self, turn: TurnKey | None) -> int | None:
        return None if turn is None else self._schedule.version(turn)


class ReplayingReplica(GatedReplica):
    """A replica that repeats the schedule of `rollout.replay`."""

    changes_between_turns = True

    def build_gate(self) -> WeightGate:
        folder = self.config.actor_rollout_ref.rollout.replay
        assert folder is not None, "only runs with `rollout.replay` have this replica"
        return ReplayGate(Schedule(read(Path(folder))))


def problems(config: Config) -> Iterator[ConfigError]:
    """Yield why the schedule of `rollout.replay` cannot be read, if so."""
    folder = config.actor_rollout_ref.rollout.replay
    try:
        if folder is not None:
            Schedule(read(Path(folder)))
    except ConfigError as error:
        yield error


def replica_class(config: Config) -> type[ReplayingReplica] | None:
    """Return what hosts an engine of a run that repeats a schedule."""
    return None if config.actor_rollout_ref.rollout.replay is None else ReplayingReplica
