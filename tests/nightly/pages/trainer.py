"""Stand-in for the trainer (`ENTRY`) in tests of the commands on a page.

It reads the options as the trainer does, and the rows, tools, reward and retriever that they name.
It plays one dialogue that calls every tool, and writes the files of a run. Nothing is trained.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from search_r1.agent.generation import build_environment, build_tag_format, check_prompts
from search_r1.scoring import build_reward_manager
from tests.fakes import ByteTokenizer, ScriptedEngine
from verl.agent.dialogue import DialogueAgent, Limits
from verl.config import Config, cli
from verl.data.prompts import load_prompts
from verl.monitor.tracking import Tracker, Tracking
from verl.trainer import main_ppo
from verl.types import Sampling, Trajectory, start_trajectory


async def play(config: Config) -> Trajectory:
    """Play one dialogue for the run's first question: each tool once, then an answer."""
    environment = build_environment(config)
    tag_format = build_tag_format(config, environment.tools)
    files = config.data.train_files
    prompts = load_prompts(config, files, None, ByteTokenizer())  # type: ignore[arg-type]
    assert len(prompts) >= min(3, config.data.train_batch_size)
    check_prompts(tag_format, prompts)
    query = str(prompts[0].extra_info["question"])
    turns = [
        f"<think> a </think> {tag_format.tags.tool(t.name).wrap(query)}" for t in environment.tools
    ]
    engine = ScriptedEngine([*turns, tag_format.tags.answer.wrap("an answer")])
    limits = Limits(max_turns=len(turns), max_prompt_length=10**6, max_obs_length=10**5)
    agent = DialogueAgent(limits, tag_format, environment, ByteTokenizer())  # type: ignore[arg-type]
    try:
        return await agent.run(start_trajectory(prompts[0]), engine, Sampling(max_tokens=10**4))
    finally:
        await environment.aclose()


def stand_in(config: Config, trackers: Sequence[Tracker] = ()) -> None:
    """Write the results of a run: metrics of a step, its options, and a copy of the tiny model."""
    trajectory = asyncio.run(play(config))
    assert not trajectory.error, trajectory.error
    (reward,) = build_reward_manager(config)([trajectory])
    folder = Path(config.trainer.default_local_dir)
    config.trainer.logger = ["jsonl"]  # others need a key
    with Tracking.from_config(config, trackers) as tracking:
        tracking.log({"critic/score/mean": reward.score}, 1)
    shutil.copytree(os.environ["STAND_IN_MODEL"], folder / "model", dirs_exist_ok=True)
    cli.write_resolved(config, folder)


def main() -> None:
    """Run a command line of the trainer; `--cfg` is passed on to it."""
    if "--cfg" in sys.argv:
        sys.exit(main_ppo.main(sys.argv[1:]))
    config = cli.compose(sys.argv[1:])
    stand_in(config)
    sys.stdout.write(f"stand-in: trained {config.actor_rollout_ref.model.path}\n")


if __name__ == "__main__":
    main()
