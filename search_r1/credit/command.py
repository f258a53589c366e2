"""What each found document was worth: the answer of a recorded dialogue, with and without it.

A document is left out of what the searches brought, wherever it stands, and the recorded answer is
looked at again by the same weights; docs/view.md.
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
    """Which trajectories, by which weights."""

    run: tyro.conf.Positional[Path]
    """a run's folder, or that of its training trajectories; the figures go into its credit/"""
    rollouts: Path | None = None
    """the run's training trajectories, where its trainer.rollout_data_dir has moved"""
    checkpoint: str = ""
    """weights that judge: global_step_N, a model's folder or hub name; default: those that sampled,
    or what the run has kept next to them"""
    steps: tuple[Annotated[int, Bounds(1)], ...] = ()
    """of the record; default: the last one"""
    limit: Annotated[int, Bounds(1)] | None = None
    """trajectories of each step, at most"""
    samples: Annotated[int, Bounds(0, 1000)] = 0
    """answers sampled anew with and without each document, and scored by the run's reward"""
    temperature: Annotated[float, Bounds(0, 10)] = 1.0
    """of those answers; 0 is greedy"""
    seed: Seed = 0
    """of those answers"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where the model computes"""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """what it computes in"""
    trust_remote_code: bool = False
    """run the code that the model's folder brings"""


main = partial(run, "search_r1.credit.running:start", CreditOptions, prog="search-r1 credit",
               description=__doc__)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
