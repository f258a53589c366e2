"""`python -m tests.nightly.proofs.determinism`: whether a greedy dialogue depends on its batch.

The example's held-out questions are answered by the tiny policy (or `--model`) with vLLM and a
BM25 server, in requests of several sizes, twice each, and once with `trainer.deterministic=true`.
Complete dialogues, documents included, and the log-probs of their tokens are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import torch
from rich.console import Console
from transformers import AutoTokenizer
from vllm import _custom_ops as ops

from benchmarks.algorithms.variants import COMMON
from search_r1.agent.generation import build_agent
from search_r1.retrieval.local_server import LocalServer
from search_r1.scoring import build_reward_manager
from verl.config import Config, cli
from verl.data.prompts import load_prompts
from verl.rollout.replica import RolloutReplica
from verl.trainer.collect import trajectory_seed
from verl.trainer.validate import VALIDATION_STREAM
from verl.types import Sampling, Trajectory, start_trajectory

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT / "example" / "data"
CORPUS = ROOT / "example" / "corpus.jsonl"
BASE = ROOT / "example" / "policy"

console = Console(soft_wrap=True)


@dataclass(frozen=True)
class Pass:
    """One pass over all questions."""

    trajectories: list[Trajectory]
    seconds: float


@dataclass(frozen=True)
class Row:
    """Result of one request size, compared with the first row of the same number format."""

    dtype: str
    size: int
    """Dialogues per request."""
    deterministic: bool
    num_dialogues: int
    num_changed: int
    """Dialogues that differ from the first row."""
    num_unrepeated: int
    """Dialogues that differ from the second pass with the same engine."""
    max_difference: float
    """Maximum difference of a log-prob from the first row, in equal dialogues; nats."""
    exact_match: float
    seconds: float
    """Duration of the first pass."""


def play(config: Config, sizes: Sequence[int], sampled: bool, times: int) -> list[list[Pass]]:
    """Run passes with one engine, `times` for each size."""
    tokenizer = AutoTokenizer.from_pretrained(config.actor_rollout_ref.model.path)
    prompts = load_prompts(config, config.data.val_files, config.data.val_data_num, tokenizer)
    starts = [
        start_trajectory(prompt, group=str(row), seed=trajectory_seed(0, VALIDATION_STREAM, row))
        for row, prompt in enumerate(prompts)
    ]
    sampling = Sampling(config.data.max_response_length, 1.0 if sampled else 0.0, 1.0)
    return asyncio.run(_passes(config, starts, sampling, sizes, times))


async def _passes(
    config: Config, starts: Sequence[Trajectory], sampling: Sampling, sizes: Sequence[int],
    times: int,
) -> list[list[Pass]]:  # fmt: skip
    replica = RolloutReplica(config, build_agent, 0)
    await replica.engine.start()
    # A warm-up for everything that the first request initializes.
    await replica.rollout(starts[:2], sampling)
    try:
        return [[await _pass(replica, starts, sampling, n) for _ in range(times)] for n in sizes]
    finally:
        await replica.engine.shutdown()


async def _pass(
    replica: RolloutReplica, starts: Sequence[Trajectory], sampling: Sampling, size: int
) -> Pass:
    start = time.perf_counter()
    done: list[Trajectory] = []
    for first in range(0, len(starts), size):
        done += await replica.rollout(starts[first : first + size], sampling)
    return Pass(done, time.perf_counter() - start)


def num_changed(one: Sequence[Trajectory], other: Sequence[Trajectory]) -> int:
    """Return the number of dialogues whose tokens differ."""
    return sum(a.ids != b.ids for a, b in zip(one, other, strict=True))


def max_difference(one: Sequence[Trajectory], other: Sequence[Trajectory]) -> float:
    """Return the maximum difference of a token's log-prob in equal dialogues, in nats."""
    pairs = [
        (x, y)
        for a, b in zip(one, other, strict=True)
        if a.ids == b.ids
        for p, q in zip(a.segments, b.segments, strict=True)
        for x, y in zip(p.log_probs, q.log_probs, strict=True)
    ]
    return max((abs(x - y) for x, y in pairs), default=0.0)


def measure(
    dtype: str, sizes: Sequence[int], options: Sequence[str], sampled: bool, times: int = 2
) -> list[Row]:
    """Return one row per size, then one of a deterministic engine with the largest size."""
    rows: list[Row] = []
    first: list[Trajectory] = []
    for deterministic in (False, True):
        own_sizes = [max(sizes)] if deterministic else sizes
        own_options = (f"actor_rollout_ref.rollout.dtype={dtype}",
                       f"trainer.deterministic={str(deterministic).lower()}")  # fmt: skip
        config = cli.compose([*options, *own_options])
        reward = build_reward_manager(config)
        for size, passes in zip(own_sizes, play(config, own_sizes, sampled, times), strict=True):
            trajectories = passes[0].trajectories
            first = first or trajectories
            row = Row(
                dtype=dtype,
                size=size,
                deterministic=deterministic,
                num_dialogues=len(trajectories),
                num_changed=num_changed(first, trajectories),
                num_unrepeated=num_changed(trajectories, passes[-1].trajectories),
                max_difference=max_difference(first, trajectories),
                exact_match=fmean(scored.components["em"] for scored in reward(trajectories)),
                seconds=passes[0].seconds,
            )
            rows.append(row)
            console.print(row)
    return rows


def product_rows(dtype: torch.dtype, inputs: int, outputs: int) -> list[int]:
    """Return the row counts whose product in vLLM's CPU kernel differs from the same rows of 64."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, inputs, generator=generator).to(dtype)
    weight = (torch.randn(outputs, inputs, generator=generator) / inputs**0.5).to(dtype)
    handler = ops.create_onednn_mm(weight.t(), 32)
    whole = ops.onednn_mm(handler, x, None)
    sizes = range(1, 64)
    parts = {size: ops.onednn_mm(handler, x[:size].clone(), None) for size in sizes}
    return [size for size in sizes if not torch.equal(parts[size], whole[:size])]


def print_products() -> None:
    """Print how the matrix products of two models depend on the number of rows."""
    shapes = ((128, 384), (256, 128), (960, 960), (960, 2560), (2560, 960), (960, 49152))
    threads = torch.get_num_threads()
    console.print(f"{threads} threads; numbers of rows whose product differs from that of 64 rows:")
    for dtype in (torch.float32, torch.bfloat16):
        for inputs, outputs in shapes:
            sizes = product_rows(dtype, inputs, outputs) or "none"
            console.print(f"{dtype} {inputs} x {outputs}: {sizes}")


def markdown(rows: Sequence[Row]) -> str:
    """Return the rows as a table for docs/evidence/determinism.md."""
    names = ("format", "dialogues at once", "changed", "changed when repeated",
             "log-probs differ by", "exact match", "seconds")  # fmt: skip
    lines = ["| " + " | ".join(names) + " |", "| --- " * len(names) + "|"]
    for row in rows:
        size = f"{row.size}, `deterministic`" if row.deterministic else str(row.size)
        cells = (row.dtype, size, f"{row.num_changed} of {row.num_dialogues}",
                 str(row.num_unrepeated), f"{row.max_difference:.1e}", f"{row.exact_match:.3f}",
                 f"{row.seconds:.1f}")  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the measurement and write its results."""
    parser = argparse.ArgumentParser(description="Greedy dialogues in batches of several sizes.")
    parser.add_argument("--model", type=Path, default=BASE, help="policy; the tiny one if left out")
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rows", type=int, default=120, help="held-out questions")
    parser.add_argument("--sampled", action="store_true", help="at temperature 1, with fixed seeds")
    parser.add_argument("--products", action="store_true", help="matrix products alone; no engine")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "benchmarks" / "determinism")
    parser.add_argument("options", nargs="*", help="options of the trainer, key=value")
    args = parser.parse_args()
    if args.products:
        print_products()
        return
    if not (args.model / "config.json").exists():
        sys.exit(f"no model at {args.model}: write it by python -m example.tiny_policy --out DIR")
    logging.basicConfig(level=logging.WARNING)
    args.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    with LocalServer(["--retriever_name", "bm25", "--corpus_path", str(CORPUS)]) as server:
        options = [
            f"actor_rollout_ref.model.path={args.model.resolve()}",
            f"data.train_files={DATA / 'train.parquet'}",
            f"data.val_files={DATA / 'val.parquet'}",
            f"data.val_data_num={args.rows}",
            f"retriever.url={server.url}/retrieve",
            *COMMON,
            *args.options,
        ]
        for dtype in args.dtypes:
            rows += measure(dtype, args.sizes, options, args.sampled)
    (args.out / "rows.json").write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n")
    (args.out / "table.md").write_text(markdown(rows))
    console.print(markdown(rows), markup=False)


if __name__ == "__main__":
    main()
