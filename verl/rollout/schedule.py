"""Records which weights sampled each turn of a run, so that another run can repeat it.

A run with `rollout.max_staleness` writes one JSONL file per step to the folder `schedule/`, with
one line for each trajectory that the step took. With `rollout.replay`, another run of the same
options samples every turn with the version that sampled it then, independently of timing.
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
TurnPart = tuple[str, int, int, int]
"""A part of a turn: the trajectory's key, the number of the turn, and the number of the turn's
tokens before the part, which is 0 unless new weights interrupted the turn."""


class ScheduleEntry(BaseModel, frozen=True):
    """The record of one trajectory; a line of the file."""

    group: str
    sample: int
    replica: int
    versions: tuple[int, ...]
    """Version with which each turn started."""
    cuts: tuple[tuple[int, int, int], ...] = ()
    """Interruptions: (turn, number of its tokens before, version that continued it)."""


def entry_of(trajectory: Trajectory) -> ScheduleEntry:
    """Return the record of a trajectory."""
    versions, cuts = list[int](), list[tuple[int, int, int]]()
    for turn, segment in enumerate(s for s in trajectory.segments if s.origin is Origin.POLICY):
        (first, num_tokens), *later = segment.version_runs
        versions.append(first)
        for version, num_more in later:
            cuts.append((turn, num_tokens, version))
            num_tokens += num_more
    return ScheduleEntry(
        group=trajectory.group, sample=trajectory.sample, replica=trajectory.replica,
        versions=tuple(versions), cuts=tuple(cuts),
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
        self._versions: dict[TurnPart, int] = {}
        self._ends: dict[TurnPart, int] = {}
        self._parts: dict[TrajectoryKey, list[TurnPart]] = {}
        for entry in entries:
            key = (entry.group, entry.sample)
            last_parts = {turn: (*key, turn, 0) for turn in range(len(entry.versions))}
            versions = {last_parts[turn]: version for turn, version in enumerate(entry.versions)}
            for turn, num_tokens, version in entry.cuts:
                self._ends[last_parts[turn]] = num_tokens
                last_parts[turn] = (*key, turn, num_tokens)
                versions[last_parts[turn]] = version
            self._versions |= versions
            self._parts[key] = list(versions)
        self._pending: dict[TurnPart, int] = {}
        """Versions of the parts that running trajectories still have to sample."""

    def version(self, part: TurnPart) -> int | None:
        """Return the version that sampled a part; None if it was not recorded."""
        return self._versions.get(part)

    def end(self, part: TurnPart) -> int | None:
        """Return after how many tokens of its turn this part was interrupted, or None."""
        return self._ends.get(part)

    def start(self, key: TrajectoryKey) -> None:
        """Note that a trajectory starts: all of its parts are pending."""
        self._pending |= {part: self._versions[part] for part in self._parts.get(key, ())}

    def mark_done(self, part: TurnPart) -> None:
        """Note that a part was sampled, or failed."""
        self._pending.pop(part, None)

    def finish(self, key: TrajectoryKey) -> None:
        """Note that a trajectory has finished, possibly with fewer turns than recorded."""
        for part in self._parts.get(key, ()):
            self.mark_done(part)

    def is_done_before(self, version: int) -> bool:
        """Whether no part of weights older than `version` is pending."""
        return all(other >= version for other in self._pending.values())


def load_schedule(folder: str | None) -> Schedule | None:
    """Read the schedule to repeat; None if `folder` is None."""
    return None if folder is None else Schedule(read(Path(folder)))


def problems(config: Config) -> Iterator[ConfigError]:
    """Yield why the schedule of `rollout.replay` cannot be read, if so."""
    try:
        load_schedule(config.actor_rollout_ref.rollout.replay)
    except ConfigError as error:
        yield error
