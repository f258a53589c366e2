"""Print the table of docs/placement.md: `python -m benchmarks.step_time.tables NAME=FOLDER ...`.

Each folder contains a model's config.json. The setting: 512 prompts x 5 dialogues of about 1,300
tokens on 8 cards.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from search_r1.plan.command import DialogueOptions, PlanOptions, RateOptions
from search_r1.plan.placements import PlacementResult
from search_r1.plan.planning import choose, margins, plan_all

SEARCHES = {
    "BM25, 44k passages": (0.015, 0.032),
    "dense, 1M passages": (0.5, 0.73),
    "slow tail": (0.5, 5.0),
}
"""Median and 99th percentile in s, measured on 2 cores with 64 clients; the last is assumed."""
WEIGHT_TRANSFERS = {"files": (None, None), "1 + 0.5 s": (1.0, 0.5)}
"""Seconds to write the weights and to load them into engines; None: estimated for files."""


def fastest(planned: Sequence[PlacementResult], staleness: int, is_shared: bool) -> str:
    """Describe the fastest placement that fits: seconds per step, and the split of the cards."""
    fitting = [
        result
        for result in planned
        if result.capacity.fits
        and result.placement.staleness == staleness
        and result.placement.shares_cards == is_shared
    ]
    if not fitting:
        return "-"
    best = min(fitting, key=lambda result: result.outcome.step_s)
    seconds = f"{best.outcome.step_s:.0f}"
    return seconds if is_shared else f"{seconds} ({best.placement.name})"


def row(name: str, folder: str, searches: str, transfer: str) -> str:
    """Plan one setting and return its row of the table."""
    p50, p99 = SEARCHES[searches]
    publish_s, adopt_s = WEIGHT_TRANSFERS[transfer]
    options = PlanOptions(
        options=(f"actor_rollout_ref.model.path={folder}",),
        rollout_cards="0,1,2,3", staleness="0,1,4", steps=2,
        dialogue=DialogueOptions(
            prompt_tokens=200, turn_tokens=125, observation_tokens=480,
            search_p50=p50, search_p99=p99,
        ),
        rates=RateOptions(publish_s=publish_s, adopt_s=adopt_s),
    )  # fmt: skip
    planned = plan_all(options)
    best = choose(planned)
    assert best is not None, "these models fit 8 cards"
    gain, placement = margins(best, planned)["today"], best.placement
    cells = [
        name, searches, transfer, fastest(planned, 0, True),
        *(fastest(planned, staleness, False) for staleness in (0, 1, 4)),
        f"{placement.name}, {placement.staleness}", f"{1 + gain:.2f}", f"{best.card_idle:.0%}",
        f"{best.capacity.rank_gb:.0f}, {best.capacity.engine_gb:.0f}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main(models: Sequence[str]) -> None:
    """Print a row for each model (`NAME=FOLDER`), retriever and weight transfer."""
    head = ("model", "searches", "weights", "shared, 0", "split, 0", "split, 1",
            "split, 4", "best placement, staleness", "speedup over shared, 0", "cards idle",
            "GB of rank, engine")  # fmt: skip
    print(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}", flush=True)  # noqa: T201
    for name, folder in (model.split("=", 1) for model in models):
        for transfer in WEIGHT_TRANSFERS:
            for searches in SEARCHES:
                print(row(name, folder, searches, transfer), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
