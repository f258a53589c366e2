"""Reads what a replay needs, the edit and the recorded trajectories, before torch is imported."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from search_r1.experimental.replay.command import ReplayOptions
from search_r1.experimental.replay.playing import Edit
from search_r1.experimental.replay.weights import read_run_config
from search_r1.runs.folder import find_rollouts, read_config
from verl.agent.interface import Item
from verl.data.trajectories import RecordedTrajectory, read_step, step_path
from verl.errors import ConfigError, DataError, explain

DOCUMENTS: TypeAdapter[Any] = TypeAdapter(list[list[Item]] | list[Item])


@dataclass(frozen=True)
class TrajectoryRef:
    """A recorded trajectory: its step, its line in the step's file, and all rows of the step."""

    step: int
    line: int
    rows: Sequence[RecordedTrajectory]

    def __str__(self) -> str:
        return f"{self.step}:{self.line}"

    @property
    def recorded(self) -> RecordedTrajectory:
        return self.rows[self.line]


def start(options: ReplayOptions) -> int:
    """Replay and print; return 0, or 2 if a tool failed. Raises UserError."""
    config = read_run_config(options.run, options.device, options.retriever_url)
    edit, refs = read_edit(options), read_trajectories(options)
    # torch and transformers take seconds to import
    from search_r1.experimental.replay.replaying import replay_all  # noqa: PLC0415

    return replay_all(options, config, refs, edit)


def read_edit(options: ReplayOptions) -> Edit:
    """Return the edit that the options describe. Raises ConfigError or DataError."""
    if options.query is not None and options.text is not None:
        fix = "write the query into the text"
        raise ConfigError(explain("--query", "--text as well", "one of them", fix))
    documents = None
    if options.documents is not None:
        try:
            content = DOCUMENTS.validate_json(options.documents.read_bytes())
        except (OSError, ValueError) as error:
            expected = 'a list of {"title": ..., "text": ...}, or one such list for each call'
            got = f"{options.documents} ({' '.join(str(error).split())[:200]})"
            raise DataError(explain("--documents", got, expected, "write such a file")) from error
        documents = content if list in map(type, content) else [content]
    return Edit(options.turn, options.query, options.text, documents)


def rollouts_of(options: ReplayOptions) -> Path:
    """Return the folder of the run's trajectories. Raises ConfigError."""
    folder = options.rollouts or find_rollouts(options.run, read_config(options.run))
    if folder is None:
        fix = "trainer.rollout_data_dir=FOLDER in the next run, or --rollouts FOLDER"
        expected = "a run that records its trajectories"
        raise ConfigError(explain("RUN", options.run, expected, fix))
    return folder


def read_trajectories(options: ReplayOptions) -> list[TrajectoryRef]:
    """Read the selected trajectories. Raises ConfigError, or DataError for a truncated file."""
    folder, refs = rollouts_of(options), list[TrajectoryRef]()
    for name in options.trajectory:
        step, colon, line = name.partition(":")
        if not (step.isdecimal() and (line.isdecimal() or not colon)):
            expected = "STEP:LINE, or STEP for all of a step"
            raise ConfigError(explain("--trajectory", name, expected, "such as --trajectory 3:0"))
        has_step = step_path(folder, int(step)).is_file()
        rows = read_step(folder, int(step)) if has_step else []
        if not has_step or (colon and int(line) >= len(rows)):
            fix = "name a recorded one, or the folder of the trajectories by --rollouts"
            expected = f"a line below {len(rows)}" if has_step else f"a step in {folder}"
            raise ConfigError(explain("--trajectory", name, expected, fix))
        lines = [int(line)] if colon else range(len(rows))
        refs += [TrajectoryRef(int(step), number, rows) for number in lines]
    if len(refs) > 1 and (options.gradient or read_edit(options).changes):
        got, expected = f"{len(refs)} trajectories", "one, with an edit or --gradient"
        raise ConfigError(explain("--trajectory", got, expected, f"--trajectory {refs[0]}"))
    return refs
