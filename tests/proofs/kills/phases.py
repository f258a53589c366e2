"""In which phase of a step a run is, from the clocks of the step before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

PHASES = ("gen", "reward", "old_log_prob", "values", "adv", "update_critic", "update_actor",
          "guard", "update_weights")  # fmt: skip
"""In the order of a step."""


def phase_of(
    since: float | None, rows: Sequence[Mapping[str, float | None]], is_saving: bool
) -> str:
    """What a run does `since` seconds after its last row, if it is as fast as before.

    `since` is None before the first row of a start. Past the end of a step a run validates, saves,
    or is being built again.
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
