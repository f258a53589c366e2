"""Run replays: load the weights, replay, and print."""

import asyncio
import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import torch

from search_r1.agent.generation import build_agent
from search_r1.experimental.replay.command import ReplayOptions
from search_r1.experimental.replay.findings import Replay, as_text, replay_report
from search_r1.experimental.replay.playing import Edit, replay_trajectory, response_finder, turns_of
from search_r1.experimental.replay.reading import TrajectoryRef, rollouts_of
from search_r1.experimental.replay.weights import find_weights, nearest_version
from search_r1.inference.ending import exits_at_signals
from search_r1.inference.model import model_folder, running_engine
from search_r1.plain import escape_controls, json_line
from search_r1.scoring import build_reward_manager
from verl.agent.dialogue import DialogueAgent
from verl.agent.environment import ObservationListener
from verl.agent.interface import ToolCall
from verl.config import Config
from verl.errors import ConfigError, explain
from verl.files import exclusive_lock
from verl.machine import num_threads
from verl.remote_code import set_trust
from verl.training.devices import DETERMINISTIC_ENV, device_type, rollout_dtype
from verl.types import Sampling, Status


@exits_at_signals()
def replay_all(
    options: ReplayOptions, config: Config, refs: Sequence[TrajectoryRef], edit: Edit
) -> int:
    """Replay and print; return 0, or 2 if a tool failed. Raises UserError."""
    set_trust(config.actor_rollout_ref.model.trust_remote_code)
    reward = build_reward_manager(config)
    # As many threads as a replica of a run on this machine, so that sums have the same order.
    threads = num_threads()
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    if config.trainer.deterministic:
        os.environ.update(DETERMINISTIC_ENV)
    with contextlib.ExitStack() as stack:
        if device_type(config.trainer.device) == "cuda":  # a training run needs all of its GPUs
            stack.enter_context(exclusive_lock(options.run, "RUN, without --device cpu"))
        replays = asyncio.run(run_replays(options, config, refs, edit))
        reports = [replay_report(config, r, edit, reward, options.gradient) for r in replays]
    for report in reports:
        sys.stdout.write(json_line(report) if options.json else escape_controls(as_text(report)))
    if len(reports) > 1 and not options.json:
        num_identical = sum(report["identical"] for report in reports)
        sys.stdout.write(f"{num_identical} of {len(reports)} equal the record bit for bit\n")
    return 2 if any(replay.trajectory.status is Status.FAILED for replay in replays) else 0


async def run_replays(
    options: ReplayOptions, config: Config, refs: Sequence[TrajectoryRef], edit: Edit
) -> list[Replay]:
    """Replay each trajectory with the weights that sampled it. Raises UserError."""
    known, agent, engine = find_weights(options.run, config), None, None
    replays: list[Replay] = []
    new_calls: list[ToolCall] = []
    rollout = config.actor_rollout_ref.rollout
    sampling = Sampling(config.data.max_response_length, rollout.temperature, rollout.top_p)

    def version_of(ref: TrajectoryRef) -> int:
        turns = turns_of(ref.recorded.trajectory)
        return turns[min(edit.turn, len(turns)) - 1][0].weight_version

    async with contextlib.AsyncExitStack() as stack:
        for version, group in groupby(sorted(refs, key=version_of), key=version_of):
            used = nearest_version(known, version)
            folder = stack.enter_context(model_folder(known[used], rollout_dtype(config)))
            if agent is None or engine is None:
                config.actor_rollout_ref.model.path = str(folder)
                agent = dialogue_agent(config, lambda call, _: new_calls.append(call))
                stack.push_async_callback(agent.environment.aclose)
                engine = await stack.enter_async_context(running_engine(config))
            await engine.update_weights(str(folder), used)
            for ref in group:
                num_calls = len(new_calls)
                trajectory = await replay_trajectory(
                    agent, engine, ref.recorded.trajectory, edit, sampling, used,
                    response_finder(rollouts_of(options), agent.format),
                )  # fmt: skip
                num_new = len(new_calls) - num_calls
                replays.append(Replay(ref, trajectory, version, used, known[used], num_new))
    return replays


def dialogue_agent(config: Config, on_observation: ObservationListener) -> DialogueAgent:
    """Return the run's agent. Raises ConfigError for a custom one, whose turns are not known."""
    agent = build_agent(config)
    if not isinstance(agent, DialogueAgent):
        fix = "replay a run of agent.name=dialogue"
        raise ConfigError(explain("agent.name", config.agent.name, "dialogue", fix))
    return replace(agent, environment=replace(agent.environment, on_observation=on_observation))
