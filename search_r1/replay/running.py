"""Replays carried out: what a command line names, the weights that sampled, and their engine."""

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter

from search_r1.agent.generation import build_agent
from search_r1.inference.model import model_folder, running_engine
from search_r1.plain import escape_controls, json_line
from search_r1.replay.command import ReplayOptions
from search_r1.replay.findings import Place, Replay, findings, in_words
from search_r1.replay.playing import Edit, finder, play, turns_of
from search_r1.scoring import build_reward_manager
from search_r1.view.run import find_rollouts, read_config
from verl.agent.dialogue import DialogueAgent
from verl.agent.environment import ObservationListener
from verl.agent.interface import Item, ToolCall
from verl.checkpoint.folders import RunState, all_complete, is_complete
from verl.config import Config
from verl.data.trajectories import read_step, step_path
from verl.errors import ConfigError, DataError, explain
from verl.files import exclusive_lock
from verl.remote_code import set_trust
from verl.training.devices import DETERMINISTIC_ENV, device_type, rollout_dtype
from verl.types import Sampling, Status

DOCUMENTS: TypeAdapter[Any] = TypeAdapter(list[list[Item]] | list[Item])
MAX_RETRIES, DEADLINE_S = 2, 20.0
"""Of a search: somebody is waiting."""


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
        has_step = step_path(folder, int(step)).is_file()
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


FIRST = 1
"""The version of the weights that a run begins with."""


def start(options: ReplayOptions) -> int:
    """Replay and print; 2 where a tool failed. Raises UserError."""
    config = read_run(options.run, options.device, options.retriever_url)
    edit, places = read_edit(options), read_places(options)
    set_trust(config.actor_rollout_ref.model.trust_remote_code)
    reward = build_reward_manager(config)
    # This process computes as a replica of the run does on this machine.
    threads = os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    torch.set_num_threads(int(threads))
    if config.trainer.deterministic:
        os.environ.update(DETERMINISTIC_ENV)
    with contextlib.ExitStack() as stack:
        if device_type(config.trainer.device) == "cuda":  # a run that trains needs all of its cards
            stack.enter_context(exclusive_lock(options.run, "RUN, without --device cpu"))
        replays = asyncio.run(replayed(options, config, places, edit))
        found = [findings(config, one, edit, reward, options.gradient) for one in replays]
    for one in found:
        sys.stdout.write(json_line(one) if options.json else escape_controls(in_words(one)))
    if len(found) > 1 and not options.json:
        same = sum(one["identical"] for one in found)
        sys.stdout.write(f"{same} of {len(found)} are the recorded ones bit for bit\n")
    return 2 if any(one.trajectory.status is Status.FAILED for one in replays) else 0


async def replayed(
    options: ReplayOptions, config: Config, places: Sequence[Place], edit: Edit
) -> list[Replay]:
    """Each trajectory played again, by the versions that sampled them. Raises UserError."""
    known, done, agent, engine = weights_of(options.run, config), list[Replay](), None, None
    rollout, heard = config.actor_rollout_ref.rollout, list[ToolCall]()
    sampling = Sampling(config.data.max_response_length, rollout.temperature, rollout.top_p)

    def version_of(place: Place) -> int:
        turns = turns_of(place.recorded.trajectory)
        return turns[min(edit.turn, len(turns)) - 1][0].version_runs[0][0]

    async with contextlib.AsyncExitStack() as stack:
        for version, group in groupby(sorted(places, key=version_of), key=version_of):
            used = nearest(known, version)
            folder = stack.enter_context(model_folder(known[used], rollout_dtype(config)))
            if agent is None or engine is None:
                config.actor_rollout_ref.model.path = str(folder)
                agent = dialogue_agent(config, lambda call, _: heard.append(call))
                stack.push_async_callback(agent.environment.aclose)
                engine = await stack.enter_async_context(running_engine(config))
            await engine.update_weights(str(folder), used)
            for place in group:
                asked = len(heard)
                trajectory = await play(
                    agent, engine, place.recorded.trajectory, edit, sampling, used,
                    finder(rollouts_of(options), agent.format),
                )  # fmt: skip
                num_asked = len(heard) - asked
                done.append(Replay(place, trajectory, version, used, known[used], num_asked))
    return done


def dialogue_agent(config: Config, heard: ObservationListener) -> DialogueAgent:
    """The run's agent. Raises ConfigError for one that is not ours: its turns are not known."""
    agent = build_agent(config)
    if not isinstance(agent, DialogueAgent):
        fix = "replay a run of agent.name=dialogue"
        raise ConfigError(explain("agent.name", config.agent.name, "dialogue", fix))
    return replace(agent, environment=replace(agent.environment, on_observation=heard))


def weights_of(run: Path, config: Config) -> dict[int, str]:
    """Where the weights of each version are: a checkpoint, or the model that the run began with."""
    begun = Path(config.trainer.resume_mode)
    found = {FIRST: config.actor_rollout_ref.model.path}
    for folder in [*all_complete(run), *([begun] if is_complete(begun) else [])]:
        state = RunState.read(folder)
        found[state.step + 1 if state.version is None else state.version] = str(folder)
    return found


def nearest(known: Iterable[int], version: int) -> int:
    """The version of those that is next to another, the older of two."""
    return min(known, key=lambda one: (abs(one - version), one))
