"""Replay recorded trajectories by the weights that sampled them, as they were or with an edit.

Without an edit it says whether every token and log-prob is the recorded one; see docs/view.md.
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
    """Which trajectories, and what is changed."""

    run: tyro.conf.Positional[Path]
    """the run's folder (trainer.default_local_dir), with its checkpoints"""
    trajectory: tuple[str, ...]
    """STEP:LINE, lines counted from 0 as in the addresses of search-r1 view; STEP: all of a step"""
    rollouts: Path | None = None
    """the run's trajectories, where its trainer.rollout_data_dir has moved"""
    turn: Annotated[int, Bounds(1)] = 1
    """the policy's turn to go on from, counted from 1; those before it stay as they were"""
    query: str | None = None
    """what that turn asks for instead"""
    text: str | None = None
    """what the policy says in it instead; it goes on from a text that closes no call or answer"""
    documents: Path | None = None
    """JSON file with what that turn's call brings instead: a list of {"title", "text"}"""
    gradient: bool = False
    """also compare the gradients of the recorded trajectory and of the replayed one"""
    retriever_url: str | None = None
    """asked for what was never recorded, instead of the run's retriever.url"""
    device: str | None = None
    """cpu or cuda, instead of the run's trainer.device"""
    json: bool = False
    """print one JSON object a trajectory, the replayed one's tokens included"""


main = partial(run, "search_r1.replay.running:start", ReplayOptions, prog="search-r1 replay",
               description=__doc__)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
