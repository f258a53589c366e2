"""`search-r1 plan`: the step time of each placement, simulated, and the best with its margin.

Options of the training run are given as `search-r1 train` takes them; speeds and dialogues by hand,
or by a run of some steps (--run). Nothing is loaded or started. See docs/placement.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from search_r1.options import run
from search_r1.plan.options import PlanOptions


def main(argv: Sequence[str] | None = None) -> int:
    """Command-line entry; returns the exit code."""
    return run("search_r1.plan.planning:start", PlanOptions, argv, prog="search-r1 plan",
               description=__doc__)  # fmt: skip
