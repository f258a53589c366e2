"""Predict the published run of Search-R1: 133 s per step, with 512 prompts x 5 on 8 H100.

`python -m benchmarks.step_time.published FOLDER`, where FOLDER contains Qwen2.5-3B's config.json.
Nothing was fitted to this run. The original trainer is simulated as it works: all dialogues take
each turn together, then all searches are one request; engines prefill the whole context in every
turn; the state of the ranks is offloaded to the host between passes.
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
"""Queries/s of a flat index of 21 million passages with its encoder on GPUs; both are assumed."""
OFFLOADED_BYTES = 16 + 4
"""Bytes per parameter of actor and reference, which the original's options offload to the host."""


def split_turns(batch: Batch) -> list[Batch]:
    """Return one batch per turn, with the dialogues that take it.

    Each has its whole context as the prompt, because the original keeps no prefix cache.
    """
    batches = []
    for number in range(max(len(dialogue.turns) for dialogue in batch.dialogues)):
        dialogues = []
        for dialogue in batch.dialogues:
            if number < len(dialogue.turns):
                before = dialogue.turns[:number]
                added = sum(turn.tokens + turn.observation_tokens for turn in before)
                turn = Turn(dialogue.turns[number].tokens)
                dialogues.append(Dialogue(dialogue.prompt_tokens + added, (turn,)))
        batches.append(Batch(tuple(dialogues), 1))
    return batches


def lockstep_s(batch: Batch, rates: EngineRates, queries_s: float) -> float:
    """Simulate a rollout in which every turn waits for the slowest dialogue; returns seconds."""
    no_training = StepCosts(lambda _: 1e-9, lambda _: 0.0, 0.0, 0.0)
    setup = Setup(rates, CARDS, no_training)
    turns = split_turns(batch)
    generation_s = sum(simulate(setup, [turn], 1).rollout_s for turn in turns)
    search_s = sum(len(turn.dialogues) for turn in turns[1:]) / queries_s
    return generation_s + search_s


def main(path: str) -> None:
    """Print the predicted seconds of each part of the original's step, and of our own step."""
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
    offload_s = 2 * OFFLOADED_BYTES * shape.parameters() / CARDS / (options.rates.host_gb_s * GB)
    tokens = sum(batch.lengths) / len(batch.lengths)
    print(f"{tokens:.0f} tokens per dialogue; published {PUBLISHED_S} s")  # noqa: T201
    for queries_s in SEARCH_RATES:
        rollout_s = lockstep_s(batch, rates, queries_s)
        total = rollout_s + train_s + driver_s + offload_s + costs.publish_s
        print(  # noqa: T201
            f"original, {queries_s:.0f} queries/s: rollout {rollout_s:.1f}, passes {train_s:.1f}, "
            f"driver {driver_s:.1f}, offload {offload_s:.1f}, weights {costs.publish_s:.1f}: "
            f"{total:.1f} s ({total / PUBLISHED_S - 1:+.0%})"
        )
    print(f"this trainer, staleness 0: {ours.outcome.step_s:.1f} s")  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
