"""The table of docs/placement.md: `python -m benchmarks.step_time.tables NAME=FOLDER ...`.

Each folder holds a model's config.json. 512 prompts x 5 dialogues of about 1,300 tokens on 8 cards.
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
"""Median and 99th percentile: two measured on 2 cores with 64 clients, the last assumed."""
HAND_OVER = {"files": (None, None), "1 + 0.5 s": (1.0, 0.5)}
"""Seconds until weights are written and until engines have them; None: through files."""


def fastest(planned: Sequence[PlacementResult], staleness: int, is_shared: bool) -> str:
    """Seconds of the fastest that fits, and how it divides the cards."""
    fitting = [
        one
        for one in planned
        if one.capacity.fits
        and one.placement.staleness == staleness
        and one.placement.shares_cards == is_shared
    ]
    if not fitting:
        return "-"
    best = min(fitting, key=lambda one: one.outcome.step_s)
    seconds = f"{best.outcome.step_s:.0f}"
    return seconds if is_shared else f"{seconds} ({best.placement.name})"


def row(name: str, folder: str, searches: str, hand_over: str) -> str:
    """One setting."""
    (p50, p99), (publish_s, adopt_s) = SEARCHES[searches], HAND_OVER[hand_over]
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
    gain, placed = margins(best, planned)["today"], best.placement
    cells = [
        name, searches, hand_over, fastest(planned, 0, True),
        *(fastest(planned, staleness, False) for staleness in (0, 1, 4)),
        f"{placed.name}, {placed.staleness}", f"{1 + gain:.2f}", f"{best.card_idle:.0%}",
        f"{best.capacity.rank_gb:.0f}, {best.capacity.engine_gb:.0f}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main(words: Sequence[str]) -> None:
    """Print a row for each model, retriever and weight transfer."""
    head = ("model", "searches", "weights", "shared, 0", "split, 0", "split, 1",
            "split, 4", "best placement, staleness", "speedup over shared, 0", "cards idle",
            "GB of rank, engine")  # fmt: skip
    print(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}", flush=True)  # noqa: T201
    for name, folder in (word.split("=", 1) for word in words):
        for hand_over in HAND_OVER:
            for searches in SEARCHES:
                print(row(name, folder, searches, hand_over), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
