"""What a command line names: the run's options, its recorded trajectories, and the edit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter

from search_r1.replay.command import ReplayOptions
from search_r1.replay.playing import Edit
from search_r1.view.run import find_rollouts, read_config
from verl.agent.interface import Item
from verl.config import Config
from verl.data.trajectories import Recorded, path_of, read_step
from verl.errors import ConfigError, DataError, explain

DOCUMENTS: TypeAdapter[Any] = TypeAdapter(list[list[Item]] | list[Item])
MAX_RETRIES, DEADLINE_S = 2, 20.0
"""Of a search: somebody is waiting."""


@dataclass(frozen=True)
class Place:
    """A recorded trajectory: the line in its step's file, with all of the step."""

    step: int
    line: int
    rows: Sequence[Recorded]

    def __str__(self) -> str:
        return f"{self.step}:{self.line}"

    @property
    def recorded(self) -> Recorded:
        return self.rows[self.line]


def read_run(folder: Path, device: str | None = None, retriever_url: str | None = None) -> Config:
    """A run's options, as one dialogue at a time needs them. Raises ConfigError."""
    found = read_config(folder)
    if not found:
        expected = "a run's trainer.default_local_dir, with config.yaml"
        raise ConfigError(explain("RUN", folder, expected, "name the folder of a run"))
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Config), found)
        config: Any = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        got, expected = " ".join(str(error).split()), "options that this release knows"
        fix = "replay by the release that made the run"
        raise ConfigError(explain(f"{folder}/config.yaml", got, expected, fix)) from error
    rollout, retriever = config.actor_rollout_ref.rollout, config.retriever
    rollout.url = rollout.replay = None  # servers of the user's are not given other weights
    rollout.interrupt_turns, rollout.merge_adapter = False, True
    retriever.speculate = False
    retriever.max_retries = min(MAX_RETRIES, retriever.max_retries)
    retriever.deadline = min(DEADLINE_S, retriever.deadline or DEADLINE_S)
    retriever.url = retriever_url or retriever.url
    config.trainer.device = device or config.trainer.device
    return config  # type: ignore[no-any-return]


def read_edit(options: ReplayOptions) -> Edit:
    """What is changed. Raises ConfigError or DataError."""
    if options.query is not None and options.text is not None:
        fix = "write the query into the text"
        raise ConfigError(explain("--query", "--text beside it", "one of them", fix))
    documents = None
    if options.documents is not None:
        try:
            found = DOCUMENTS.validate_json(options.documents.read_bytes())
        except (OSError, ValueError) as error:
            expected = 'a list of {"title": ..., "text": ...}, or one such list for each call'
            got = f"{options.documents} ({' '.join(str(error).split())[:200]})"
            raise DataError(explain("--documents", got, expected, "write such a file")) from error
        documents = found if list in map(type, found) else [found]
    return Edit(options.turn, options.query, options.text, documents)


def rollouts_of(options: ReplayOptions) -> Path:
    """Where the run's trajectories are. Raises ConfigError."""
    found = options.rollouts or find_rollouts(options.run, read_config(options.run))
    if found is None:
        fix = "trainer.rollout_data_dir=FOLDER in the next run, or --rollouts FOLDER"
        expected = "a run that keeps its trajectories"
        raise ConfigError(explain("RUN", options.run, expected, fix))
    return found


def read_places(options: ReplayOptions) -> list[Place]:
    """The trajectories that are named. Raises ConfigError, or DataError for a file that was cut."""
    folder, found = rollouts_of(options), list[Place]()
    for name in options.trajectory:
        step, colon, line = name.partition(":")
        if not (step.isdecimal() and (line.isdecimal() or not colon)):
            expected = "STEP:LINE, or STEP for all of a step"
            raise ConfigError(explain("--trajectory", name, expected, "such as --trajectory 3:0"))
        has_step = path_of(folder, int(step)).is_file()
        rows = read_step(folder, int(step)) if has_step else []
        if not has_step or (colon and int(line) >= len(rows)):
            fix = "name one that was recorded, or --rollouts FOLDER where they are now"
            expected = f"a line below {len(rows)}" if has_step else f"a step in {folder}"
            raise ConfigError(explain("--trajectory", name, expected, fix))
        lines = [int(line)] if colon else range(len(rows))
        found += [Place(int(step), one, rows) for one in lines]
    if len(found) > 1 and (options.gradient or read_edit(options).changes):
        got, expected = f"{len(found)} of them", "one, with an edit or --gradient"
        raise ConfigError(explain("--trajectory", got, expected, f"--trajectory {found[0]}"))
    return found
