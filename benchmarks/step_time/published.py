"""The published run of Search-R1, which nothing here was fitted to: 133 s a step.

`python -m benchmarks.step_time.published MODEL` with a folder of Qwen2.5-3B's config.json. 512
prompts x 5, 8 H100. Its trainer is unlike ours, so it is simulated as it works: all dialogues take
a turn together, then all searches are one request; an engine reads the whole context at each turn;
whatever the ranks hold waits on the host between passes.
"""

from __future__ import annotations

import sys

from search_r1.plan.command import PlanOptions
from search_r1.plan.placements import Costs, Placement, estimate_capacity, simulate_placement
from search_r1.plan.planning import build_workload, compose
from search_r1.plan.simulation import EngineRates, Setup, StepCosts, simulate
from search_r1.plan.workload import Batch, Dialogue, Turn
from verl.machine import GB
from verl.model_shape import read_shape

CARDS, PUBLISHED_S = 8, 133
SEARCH_RATES = (250.0, 1000.0)
"""Queries/s of a flat index of 21 million passages and its encoder on GPUs: assumptions."""
HELD = 16 + 4
"""Bytes a parameter of actor and reference, which the original's options send to the host."""


def turns(batch: Batch) -> list[Batch]:
    """One batch for each turn: those that take it, with the whole context to read."""
    found = []
    for number in range(max(len(one.turns) for one in batch.dialogues)):
        alone = []
        for one in batch.dialogues:
            if number < len(one.turns):
                before = one.turns[:number]
                added = sum(turn.tokens + turn.observation_tokens for turn in before)
                context = one.prompt_tokens + added
                alone.append(Dialogue(context, (Turn(one.turns[number].tokens),)))
        found.append(Batch(tuple(alone), 1))
    return found


def lockstep_s(batch: Batch, rates: EngineRates, queries_s: float) -> float:
    """Seconds of a rollout in which every turn waits for the slowest."""
    nothing = StepCosts(lambda _: 1e-9, lambda _: 0.0, 0.0, 0.0)
    parts = turns(batch)
    generated = [simulate(Setup(rates, CARDS, nothing), [part], 1).rollout_s for part in parts]
    searched = sum(len(part.dialogues) for part in parts[1:]) / queries_s
    return sum(generated) + searched


def main(path: str) -> None:
    """Print what comes out, part by part."""
    options = PlanOptions(options=(f"actor_rollout_ref.model.path={path}",))
    config, shape = compose(options), read_shape(path)
    assert shape is not None, f"no config.json in {path}"
    costs = Costs(config, options.rates, shape)
    batch = build_workload(options, config, None).draw(0)
    placement = Placement(0, CARDS, 0, None, 1)
    capacity = estimate_capacity(placement, costs, batch, options.card_gb)
    ours = simulate_placement(placement, costs, [batch], capacity, 1)
    rates = costs.engine_rates(batch, 1, ours.capacity.slots)
    train_s, driver_s = costs.train_s(batch), costs.driver_s(batch)
    moved = 2 * HELD * shape.parameters() / CARDS / (options.rates.host_gb_s * GB)
    tokens = sum(batch.lengths) / len(batch.lengths)
    print(f"{tokens:.0f} tokens a dialogue; published {PUBLISHED_S} s")  # noqa: T201
    for queries_s in SEARCH_RATES:
        rollout_s = lockstep_s(batch, rates, queries_s)
        total = rollout_s + train_s + driver_s + moved + costs.publish_s
        print(  # noqa: T201
            f"original, {queries_s:.0f} queries/s: rollout {rollout_s:.1f}, passes {train_s:.1f}, "
            f"driver {driver_s:.1f}, offload {moved:.1f}, weights {costs.publish_s:.1f}: "
            f"{total:.1f} s ({total / PUBLISHED_S - 1:+.0%})"
        )
    print(f"this trainer, staleness 0: {ours.outcome.step_s:.1f} s")  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
