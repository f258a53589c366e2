"""Replay recorded trajectories with the weights that sampled them, unchanged or with an edit.

Experimental: options and output may change. Without an edit, it reports whether every token and
log-prob equals the recorded one; see docs/guides/watching.md.
"""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from search_r1.options import Bounds, run


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """Which trajectories to replay, and the edit."""

    run: tyro.conf.Positional[Path]
    """the run's folder (trainer.default_local_dir), with its checkpoints"""
    trajectory: tuple[str, ...]
    """STEP:LINE, lines counted from 0 as in the addresses of search-r1 view; STEP: all of a step"""
    rollouts: Path | None = None
    """the run's trajectories, if its trainer.rollout_data_dir has moved"""
    turn: Annotated[int, Bounds(1)] = 1
    """the policy's turn to replay from, counted from 1; earlier turns stay unchanged"""
    query: str | None = None
    """new query of this turn"""
    text: str | None = None
    """new text of this turn; the policy continues it if it closes neither a call nor an answer"""
    documents: Path | None = None
    """JSON file with the new results of this turn's call: a list of {"title", "text"}"""
    gradient: bool = False
    """also compare the gradients of the recorded and the replayed trajectory"""
    retriever_url: str | None = None
    """retriever for calls without a recorded result, instead of the run's retriever.url"""
    device: str | None = None
    """cpu or cuda, instead of the run's trainer.device"""
    json: bool = False
    """print one JSON object per trajectory, with the replayed tokens"""


main = partial(
    run,
    "search_r1.experimental.replay.reading:start",
    ReplayOptions,
    prog="search-r1 replay",
    description=__doc__,
)


if __name__ == "__main__":
    sys.exit(main())
