"""`python -m benchmarks.rivals.step MODEL --trl-python PATH`: whole steps with searches.

A run of ours with the demo's options (Ray, vLLM, a BM25 server, one rank), then TRL's GRPOTrainer
with tools: the same policy, prompts, group, lengths and server, each alone on the machine. The
first step of each warms up.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.rivals.update import ROOT, Answer, contender, spread
from example.geography import DATA
from scripts.demo import OPTIONS, RETRIEVER, Demo
from search_r1.search.local_server import LocalServer
from verl.config import Config, cli
from verl.data.trajectories import read_rows
from verl.trainer.groups import cpu_env

OUT = ROOT / "runs" / "benchmarks" / "step"

console = Console(soft_wrap=True, highlight=False)


def ours(model: Path, url: str, steps: int) -> list[Answer]:
    """Seconds of each step of a run, and what it sampled."""
    shutil.rmtree(OUT, ignore_errors=True)
    Demo("grpo", 0, "cpu", OUT, time.time()).train(
        OUT / "run", url, model,
        [f"trainer.total_training_steps={steps}", "trainer.val_before_train=false",
         "trainer.test_freq=-1", f"trainer.rollout_data_dir={OUT / 'rollouts'}"],
    )  # fmt: skip
    lines = (OUT / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "timing_s/step" in row]
    return [
        {"seconds": row["timing_s/step"], "sampled": row["response_length/mean"],
         "searches": row["env/searches"], "score": row["critic/score/mean"],
         "gen": row["timing_s/gen"], "update": row["timing_s/update_actor"]}
        for row in rows
    ]  # fmt: skip


def work(config: Config) -> dict[str, Any]:
    """The prompts and answers of the run's steps, a group each, and its limits."""
    first: dict[str, dict[str, Any]] = {}
    for _, row in read_rows(OUT / "rollouts"):
        first.setdefault(row["group"], row)
    data, turns = config.data, config.max_turns
    turn, observation = data.max_response_length, data.max_obs_length
    rollout = config.actor_rollout_ref.rollout
    return {
        "prompts": [row["segments"][0]["text"] for row in first.values()],
        "answers": [row["ground_truth"] for row in first.values()],
        "step_size": data.train_batch_size * rollout.n_agent, "group": rollout.n_agent,
        "max_turns": turns, "turn_length": turn, "observation_length": observation,
        "longest": (turns + 1) * (turn + 1) + turns * (observation + 16),
        "lr": config.actor_rollout_ref.actor.optim.lr,
    }  # fmt: skip


def theirs(given: argparse.Namespace, url: str, steps: int) -> list[Answer]:
    """The same of TRL."""
    path, data = OUT / "work.json", DATA / "train.parquet"
    named = [f"actor_rollout_ref.model.path={given.model}", f"data.train_files={data}"]
    config = cli.compose([*OPTIONS["grpo"], *named, f"data.val_files={data}"])
    path.write_text(json.dumps(work(config)))
    command = [given.trl_python, "-m", "benchmarks.rivals.trl_step", str(given.model), str(path)]
    command += ["--url", url, "--micro", str(given.micro)]
    with contender(command, cpu_env()) as process:
        return [process.turn(number) for number in range(steps)]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="the demo's warm start")
    parser.add_argument("--trl-python", required=True, help="an interpreter that has TRL")
    parser.add_argument("--steps", type=int, default=4, help="of each, the first not counted")
    parser.add_argument("--micro", type=int, default=6, help="TRL's trajectories at a time")
    given = parser.parse_args()
    if given.steps < 2:
        sys.exit("got --steps 1, expected 2 or more: the first warms up")
    given.model = given.model.resolve()
    log = OUT.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with LocalServer(RETRIEVER, log_path=log) as server:
        url = f"{server.url}/retrieve"
        found = {"ours": ours(given.model, url, given.steps)}
        found["TRL"] = theirs(given, url, given.steps)
    for name, steps in found.items():
        for step in steps:
            console.print(f"{name}: {json.dumps(step)}")
    seconds = {name: [step["seconds"] for step in steps[1:]] for name, steps in found.items()}
    for name, own in seconds.items():
        console.print(f"{name}: {spread(own, 1)} s a step")
    console.print(f"ours is {median(seconds['TRL']) / median(seconds['ours']):.2f} times as fast")


if __name__ == "__main__":
    main()
