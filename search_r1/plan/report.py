"""What `search-r1 plan` prints: placements as a table or as JSON, the best and its margin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from search_r1.plan.placements import Planned, changes

EQUAL = 0.02
"""Share by which steps differ that count as equally long: then the fresher weights win."""
COLUMNS = ("cards", "engines", "stale", "budget", "slots", "step s", "rollout s", "engines idle",
           "ranks idle", "cards idle", "rank GB", "engine GB", "waits on the host")  # fmt: skip


def choose(planned: Sequence[Planned]) -> Planned | None:
    """The least stale of those that fit and are as fast as the fastest; None where none fits."""
    fitting = [one for one in planned if one.room.fits]
    if not fitting:
        return None
    limit = (1 + EQUAL) * min(one.outcome.step_s for one in fitting)
    equal = [one for one in fitting if one.outcome.step_s <= limit]
    return min(equal, key=lambda one: (one.placement.staleness, one.outcome.step_s))


def margins(best: Planned | None, planned: Sequence[Planned]) -> dict[str, float]:
    """By how much others that fit take longer, as a share: `next`, the fastest with other cards,
    `fresh`, the fastest without staleness, and `today`, shared cards without staleness."""
    if best is None:
        return {}
    others = [one for one in planned if one.room.fits]
    groups = {
        "next": [o for o in others if o.placement.rollout_cards != best.placement.rollout_cards],
        "fresh": [o for o in others if not o.placement.staleness],
        "today": [o for o in others if not o.placement.staleness and o.placement.shares_cards],
    }
    return {
        name: min(one.outcome.step_s for one in group) / best.outcome.step_s - 1
        for name, group in groups.items()
        if group
    }


def table(planned: Sequence[Planned]) -> str:
    """A Markdown row for each placement."""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *map(_row, planned)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(one: Planned) -> tuple[str, ...]:
    placement, room, outcome = one.placement, one.room, one.outcome
    size = f" x {placement.tensor_parallel}" if placement.tensor_parallel > 1 else ""
    return (
        placement.name,
        f"{placement.num_engines}{size}",
        str(placement.staleness),
        "-" if placement.token_budget is None else f"{placement.token_budget:,}",
        str(room.slots),
        f"{outcome.step_s:.1f}",
        f"{outcome.rollout_s:.1f}",
        f"{outcome.engine_idle:.0%}",
        f"{outcome.trainer_idle:.0%}",
        f"{one.card_idle:.0%}",
        "-" if room.rank_gb is None else f"{room.rank_gb:.0f}",
        "-" if room.engine_gb is None else f"{room.engine_gb:.0f}",
        ("" if room.fits else "does not fit; ") + (", ".join(room.waits) or "nothing"),
    )


def verdict(planned: Sequence[Planned]) -> str:
    """The best in a sentence, and what it gains."""
    best = choose(planned)
    if best is None:
        return "no placement fits: more cards, LoRA, or a smaller token budget (docs/memory.md)"
    placement, found = best.placement, margins(best, planned)
    words = {"next": "the next division of the cards takes", "fresh": "no staleness takes",
             "today": "shared cards without staleness take"}  # fmt: skip
    gains = "; ".join(f"{words[name]} {share:+.0%}" for name, share in found.items())
    divided = f"{placement.rollout_cards} cards for engines, {placement.train_cards} for ranks"
    cards = "all cards shared" if placement.shares_cards else divided
    if placement.critic_cards:
        cards += f", {placement.critic_cards} for the critic"
    seconds = f"{best.outcome.step_s:.1f} s a step"
    line = f"best: {cards}, staleness {placement.staleness}: {seconds}; {gains}"
    options = " ".join(f"{key}={value}" for key, value in changes(best.placement).items())
    return f"{line}\noptions: {options}"


def as_json(one: Planned) -> dict[str, Any]:
    """All that is known of a placement; seconds, shares, and GB of 10^9 bytes."""
    return {**asdict(one.placement), **asdict(one.room), **asdict(one.outcome),
            "num_engines": one.placement.num_engines, "card_idle": one.card_idle}  # fmt: skip
