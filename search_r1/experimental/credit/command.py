"""Measure what each found document was worth to the answer of a recorded dialogue.

Experimental: options and output may change. A document is removed from all search results, and the
log-prob of the recorded answer is computed again with the same weights; docs/guides/watching.md.
"""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import tyro

from search_r1.options import Bounds, Seed, run


@dataclass(frozen=True, kw_only=True)
class CreditOptions:
    """Which trajectories to measure, and with which weights."""

    run: tyro.conf.Positional[Path]
    """folder of a run or of its training trajectories; results are written into its credit/"""
    rollouts: Path | None = None
    """the run's training trajectories, if its trainer.rollout_data_dir has moved"""
    checkpoint: str = ""
    """weights to use: global_step_N, a model's folder or hub name; default: those that sampled the
    step, or the nearest that the run saved"""
    steps: tuple[Annotated[int, Bounds(1)], ...] = ()
    """recorded steps; default: the last one"""
    limit: Annotated[int, Bounds(1)] | None = None
    """maximum number of trajectories per step"""
    samples: Annotated[int, Bounds(0, 1000)] = 0
    """answers to sample with and without each document, scored by the run's reward"""
    temperature: Annotated[float, Bounds(0, 10)] = 1.0
    """temperature of the sampled answers; 0: greedy"""
    seed: Seed = 0
    """seed of the sampled answers"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """device of the model"""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """dtype of the computation"""
    trust_remote_code: bool = False
    """run code that comes with the model"""


main = partial(
    run,
    "search_r1.experimental.credit.reading:start",
    CreditOptions,
    prog="search-r1 credit",
    description=__doc__,
)


if __name__ == "__main__":
    sys.exit(main())
