"""In which phase of a step a run is, from the clocks of the step before."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

PHASES = ("gen", "reward", "old_log_prob", "values", "adv", "update_critic", "update_actor",
          "guard", "update_weights")  # fmt: skip
"""In the order of a step."""


def phase_of(
    metrics: Path, rows: Sequence[Mapping[str, float | None]], is_saving: bool, now: float = 0.0
) -> str:
    """What a run does at `now` (wall clock; 0 for this moment) if it is as fast as before.

    Past the end of a step it validates, saves, or starts.
    """
    if is_saving:
        return "saving"
    timed = [row for row in rows if row.get("timing_s/step")]
    if not timed:
        return "starting"
    since = (now or time.time()) - metrics.stat().st_mtime
    seconds = [float(timed[-1].get(f"timing_s/{name}") or 0.0) for name in PHASES]
    for name, end in zip(PHASES, accumulate(seconds), strict=True):
        if since < end:
            return name
    return "between steps or starting"
