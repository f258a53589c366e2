"""Compare whole steps with searches: `python -m benchmarks.rivals.step MODEL --trl-python PATH`.

Our side is a run with the demo's options (Ray, vLLM, a BM25 server, one rank). Then TRL's
GRPOTrainer with tools uses the same policy, prompts, group size, lengths and server. Each runs
without the other on the machine. The first step of each is a warm-up.
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

from benchmarks.rivals.update import ROOT, Answer, median_and_range, start_worker
from example.geography import DATA
from scripts.demo import EXAMPLE, OPTIONS, Demo, bm25_over
from search_r1.retrieval.local_server import LocalServer
from verl.config import Config, cli
from verl.data.trajectories import read_rows
from verl.ext.cpu_env import cpu_env

OUT = ROOT / "runs" / "benchmarks" / "step"

console = Console(soft_wrap=True, highlight=False)


def run_ours(model: Path, url: str, steps: int) -> list[Answer]:
    """Run our trainer; returns the seconds of each step, and metrics of its trajectories."""
    shutil.rmtree(OUT, ignore_errors=True)
    Demo("grpo", 0, "cpu", OUT, time.time()).train(
        OUT / "run", url, model,
        [f"trainer.total_training_steps={steps}", "trainer.val_before_train=false",
         "trainer.test_freq=-1", "trainer.guard.action=warn",
         f"trainer.rollout_data_dir={OUT / 'rollouts'}"],
    )  # fmt: skip
    lines = (OUT / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "timing_s/step" in row]
    return [
        {"seconds": row["timing_s/step"], "sampled": row["response_length/mean"],
         "searches": row["env/searches"], "score": row["critic/score/mean"],
         "gen": row["timing_s/gen"], "update": row["timing_s/update_actor"]}
        for row in rows
    ]  # fmt: skip


def recorded_work(config: Config) -> dict[str, Any]:
    """Collect the work for TRL: prompts and answers of our run, one per group, and its limits."""
    groups: dict[str, dict[str, Any]] = {}
    for _, row in read_rows(OUT / "rollouts"):
        groups.setdefault(row["group"], row)
    data, max_turns = config.data, config.max_turns
    turn_length, observation_length = data.max_response_length, data.max_obs_length
    rollout = config.actor_rollout_ref.rollout
    # A turn has an end-of-sequence token in addition, an observation its tags.
    max_length = (max_turns + 1) * (turn_length + 1) + max_turns * (observation_length + 16)
    return {
        "prompts": [row["segments"][0]["text"] for row in groups.values()],
        "answers": [row["ground_truth"] for row in groups.values()],
        "step_size": data.train_batch_size * rollout.n_agent, "group": rollout.n_agent,
        "max_turns": max_turns, "turn_length": turn_length,
        "observation_length": observation_length, "max_length": max_length,
        "lr": config.actor_rollout_ref.actor.optim.lr,
    }  # fmt: skip


def run_trl(args: argparse.Namespace, url: str, steps: int) -> list[Answer]:
    """Run TRL on the prompts of our run; returns the seconds and metrics of each step."""
    path, data = OUT / "work.json", DATA / "train.parquet"
    options = [f"actor_rollout_ref.model.path={args.model}", f"data.train_files={data}"]
    config = cli.compose([*OPTIONS["grpo"], *options, f"data.val_files={data}"])
    path.write_text(json.dumps(recorded_work(config)))
    command = [args.trl_python, "-m", "benchmarks.rivals.trl_step", str(args.model), str(path)]
    command += ["--url", url, "--micro", str(args.micro)]
    with start_worker(command, cpu_env()) as worker:
        return [worker.run(number) for number in range(steps)]


def main() -> None:
    """Run both sides and print their steps and the ratio of the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="the demo's warm start")
    parser.add_argument("--trl-python", required=True, help="an interpreter that has TRL")
    parser.add_argument(
        "--steps", type=int, default=4, help="steps per side; the first is not counted"
    )
    parser.add_argument("--micro", type=int, default=6, help="trajectories of TRL's micro-batches")
    args = parser.parse_args()
    if args.steps < 2:
        sys.exit(f"got --steps {args.steps}, expected 2 or more, because the first is a warm-up")
    args.model = args.model.resolve()
    log = OUT.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with LocalServer(bm25_over(EXAMPLE / "corpus.jsonl"), log_path=log) as server:
        url = f"{server.url}/retrieve"
        steps = {"ours": run_ours(args.model, url, args.steps)}
        steps["TRL"] = run_trl(args, url, args.steps)
    for name, answers in steps.items():
        for answer in answers:
            console.print(f"{name}: {json.dumps(answer)}")
    seconds = {name: [a["seconds"] for a in answers[1:]] for name, answers in steps.items()}
    for name, values in seconds.items():
        console.print(f"{name}: {median_and_range(values, 1)} s per step")
    console.print(f"ours is {median(seconds['TRL']) / median(seconds['ours']):.2f} times as fast")


if __name__ == "__main__":
    main()
