"""Estimates the current phase of a run's step from the timings of the step before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

PHASES = ("gen", "reward", "values", "old_log_prob", "adv", "update_critic", "update_actor",
          "guard", "update_weights")  # fmt: skip
"""Phases in the order of a step."""


def phase_of(
    since: float | None, rows: Sequence[Mapping[str, float | None]], is_saving: bool
) -> str:
    """Return the phase `since` seconds after the last row, if the step takes as long as before.

    `since` is None before a start's first row. Between steps, a run validates, saves or restarts.
    """
    if is_saving:
        return "saving"
    timed = [row for row in rows if row.get("timing_s/step")]
    if since is None or not timed:
        return "starting"
    seconds = [float(timed[-1].get(f"timing_s/{name}") or 0.0) for name in PHASES]
    for name, end in zip(PHASES, accumulate(seconds), strict=True):
        if since < end:
            return name
    return "between steps"
