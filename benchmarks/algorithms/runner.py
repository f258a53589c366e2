"""One run of the tiny policy with the real trainer: Ray, FSDP2, vLLM, BM25 over HTTP.

`python -m benchmarks.algorithms.runner --seed 0 --out DIR key=value …` makes one run; in Python,
`run_variant` does the same.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Self

import torch
from rich.console import Console

from benchmarks.algorithms.distance import distance, load
from benchmarks.algorithms.variants import COMMON
from example.geography import CORPUS, DATA
from search_r1.retrieval.local_server import LocalServer
from verl.config import cli
from verl.files import atomic_write
from verl.monitor.tracking import Tracking
from verl.trainer import run
from verl.trainer.collect import trajectory_seed
from verl.trainer.loop import RayPPOTrainer
from verl.trainer.validate import VALIDATION_STREAM, Validation
from verl.types import Prompt, Sampling, Trajectory, start_trajectory

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "example" / "policy"
RESULT = "result.json"


@dataclass(frozen=True)
class Result:
    """Result of one run, measured on the held-out questions."""

    seed: int
    options: list[str]
    curve: list[tuple[int, float]]
    """Pairs of training step and greedy EM over all held-out questions, from step 0."""
    searches: float
    """Valid searches per answer at the end, greedy."""
    sampled_em: float
    """EM at the end, sampled as in training."""
    kl: float
    """KL(policy ‖ base) at the end, nats per policy token of the sampled answers."""
    entropy: float
    """Entropy of the policy at the same tokens, nats."""
    train_seconds: float
    """Seconds of the training steps, without validation."""
    wall_seconds: float
    """Seconds of the whole run: start, training, validations and measurement."""

    @property
    def final_em(self) -> float:
        """EM of the last validation."""
        return self.curve[-1][1]

    def write(self, folder: Path) -> None:
        """Write `result.json` atomically."""
        with atomic_write(folder / RESULT) as part:
            part.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Read the result of a run; returns None if the run is not finished."""
        path = folder / RESULT
        if not path.exists():
            return None
        values = json.loads(path.read_text())
        values["curve"] = [(int(step), float(em)) for step, em in values["curve"]]
        return cls(**values)


@contextlib.contextmanager
def retriever(url: str | None = None) -> Iterator[str]:
    """Yield the URL to search at: `url`, or that of a BM25 server started for the context."""
    if url is not None:
        yield url
        return
    with LocalServer(["--retriever_name", "bm25", "--corpus_path", str(CORPUS)]) as server:
        yield f"{server.url}/retrieve"


def run_variant(
    options: Sequence[str], seed: int, out: Path, *, url: str | None = None, base: Path = BASE
) -> Result:
    """Train from `base` with `COMMON` and `options`, measure, and write the result to `out`.

    The trainer also writes its metrics, the validation dialogues and the trained model to `out`.
    """
    began = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    (out / "metrics.jsonl").unlink(missing_ok=True)
    with retriever(url) as address:
        config = cli.compose(
            [
                f"actor_rollout_ref.model.path={base}",
                f"data.train_files={DATA / 'train.parquet'}",
                f"data.val_files={DATA / 'val.parquet'}",
                f"retriever.url={address}",
                f"trainer.default_local_dir={out}",
                f"trainer.seed={seed}",
                *COMMON,
                *options,
            ]
        )
        inputs = run.prepare(config)
        with (
            Tracking.from_config(inputs.config) as logger,
            run.running_trainer(inputs, logger) as trainer,
        ):
            trainer.fit()
            validation = next(hook for hook in trainer.hooks if isinstance(hook, Validation))
            trajectories = sampled_answers(trainer, validation.prompts)
            sampled_em = fmean(r.components["em"] for r in validation.reward(trajectories))
    moved = distance(load(out / "model"), load(base), trajectories)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    result = Result(
        seed=seed,
        options=list(options),
        curve=[(row["step"], row["val/em"]) for row in rows if "val/em" in row],
        searches=rows[-1]["val/env/valid_searches"],
        sampled_em=sampled_em,
        kl=moved.kl,
        entropy=moved.entropy,
        train_seconds=sum(row.get("timing_s/step", 0.0) for row in rows),
        wall_seconds=0.0,
    )
    result = replace(result, wall_seconds=time.perf_counter() - began)
    result.write(out)
    return result


def sampled_answers(trainer: RayPPOTrainer, prompts: Sequence[Prompt]) -> list[Trajectory]:
    """Sample one trajectory per held-out question, with the sampling options of training."""
    config = trainer.config
    rollout = config.actor_rollout_ref.rollout
    sampling = Sampling(config.data.max_response_length, rollout.temperature, rollout.top_p)
    starts = [
        start_trajectory(
            prompt,
            group=f"sampled/{row}",
            seed=trajectory_seed(config.trainer.seed, VALIDATION_STREAM + 1, row),
        )
        for row, prompt in enumerate(prompts)
    ]
    return trainer.rollouts.generate(starts, sampling)


def stay_on(core: int) -> None:
    """Run this process and its children on one core, with one thread each."""
    os.sched_setaffinity(0, {core})
    os.environ["OMP_NUM_THREADS"] = "1"


def main() -> None:
    """Make one run and print its result."""
    parser = argparse.ArgumentParser(description="Run the tiny policy with the real trainer.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--url", help="a running retriever's /retrieve; one is started if left out")
    parser.add_argument("--base", type=Path, default=BASE, help="the policy to start from")
    parser.add_argument("--core", type=int, help="run on this core only")
    parser.add_argument("options", nargs="*", help="options of the trainer, key=value")
    args = parser.parse_args()
    if args.core is not None:
        stay_on(args.core)
    # This process only measures; with more threads it would take time from ranks and engines.
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING)
    base = args.base.resolve()
    result = run_variant(args.options, args.seed, args.out.resolve(), url=args.url, base=base)
    Console(soft_wrap=True).print_json(json.dumps(asdict(result)))


if __name__ == "__main__":
    main()
