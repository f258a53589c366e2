"""Which weights sampled each turn of a run: recorded by the trainer, repeated by the replicas.

The folder `schedule/` of a run with `rollout.max_staleness` has one jsonl file a step, a row for
each trajectory that the step took. With `rollout.replay` another run of the same options samples
every turn by the version that sampled it then, whatever takes how long now.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import BaseModel, ValidationError

from verl.config import Config
from verl.errors import ConfigError, explain
from verl.files import atomic_write
from verl.types import Origin, Trajectory, TrajectoryKey

FOLDER = "schedule"
REPLAY = "actor_rollout_ref.rollout.replay"
TurnPart = tuple[str, int, bool, int, int]
"""A trajectory's name, the number of a turn, and how many of its tokens were there before: 0 unless
new weights cut the turn."""


class ScheduleEntry(BaseModel, frozen=True):
    """One trajectory: the version that each turn began with, in order, and where it was sampled."""

    group: str
    sample: int
    greedy: bool
    replica: int
    versions: tuple[int, ...]
    cuts: tuple[tuple[int, int, int], ...] = ()
    """Number of a turn, and the version that continued it after so many tokens: turn, tokens,
    version."""


def entry_of(trajectory: Trajectory, greedy: bool) -> ScheduleEntry:
    """What is recorded of a trajectory."""
    versions, cuts = list[int](), list[tuple[int, int, int]]()
    for turn, segment in enumerate(s for s in trajectory.segments if s.origin is Origin.POLICY):
        (first, num_tokens), *later = segment.version_runs
        versions.append(first)
        for version, num_more in later:
            cuts.append((turn, num_tokens, version))
            num_tokens += num_more
    return ScheduleEntry(group=trajectory.group, sample=trajectory.sample, greedy=greedy,
               replica=trajectory.replica, versions=tuple(versions), cuts=tuple(cuts))  # fmt: skip


def write(directory: Path, step: int, rows: Iterable[ScheduleEntry]) -> None:
    """Keep a step's rows; a step that is run again replaces its file."""
    folder = directory / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / f"step_{step:08d}.jsonl") as part:
        part.write_text("".join(row.model_dump_json() + "\n" for row in rows))


def read(folder: Path) -> Iterator[ScheduleEntry]:
    """All rows of a folder. Raises ConfigError."""
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
            raise ConfigError(explain(REPLAY, f"{path}: {problem}", "rows of a run",
                                      "name the folder of a run")) from error  # fmt: skip


class Schedule:
    """What a replica is to repeat of the trajectories that it is asked for."""

    def __init__(self, rows: Iterable[ScheduleEntry]) -> None:
        self._versions: dict[TurnPart, int] = {}
        self._ends: dict[TurnPart, int] = {}
        self._parts: dict[TrajectoryKey, list[TurnPart]] = {}
        for row in rows:
            name = (row.group, row.sample, row.greedy)
            begun = {turn: (*name, turn, 0) for turn in range(len(row.versions))}
            versions = {begun[turn]: version for turn, version in enumerate(row.versions)}
            for turn, num_tokens, version in row.cuts:
                self._ends[begun[turn]] = num_tokens
                begun[turn] = (*name, turn, num_tokens)
                versions[begun[turn]] = version
            self._versions |= versions
            self._parts[name] = list(versions)
        self._left: dict[TurnPart, int] = {}
        """Those that are to come, of trajectories on their way."""

    def version(self, part: TurnPart) -> int | None:
        """Of the weights of a part of a turn; None where nothing was recorded."""
        return self._versions.get(part)

    def until(self, part: TurnPart) -> int | None:
        """The number of the turn's tokens where that part ends; None where it ends the turn."""
        return self._ends.get(part)

    def begin(self, name: TrajectoryKey) -> None:
        """All parts of a trajectory are to come."""
        self._left |= {part: self._versions[part] for part in self._parts.get(name, ())}

    def done(self, part: TurnPart) -> None:
        """That part was sampled, or failed."""
        self._left.pop(part, None)

    def end(self, name: TrajectoryKey) -> None:
        """No part of that trajectory comes any more, be they fewer than it had then."""
        for part in self._parts.get(name, ()):
            self.done(part)

    def is_over_before(self, version: int) -> bool:
        """Whether no turn of older weights is to come."""
        return all(other >= version for other in self._left.values())


def load_schedule(folder: str | None) -> Schedule | None:
    """What is repeated; None where nothing is."""
    return None if folder is None else Schedule(read(Path(folder)))


def problems(config: Config) -> Iterator[ConfigError]:
    """Why the recorded schedule cannot be repeated."""
    try:
        load_schedule(config.actor_rollout_ref.rollout.replay)
    except ConfigError as error:
        yield error
