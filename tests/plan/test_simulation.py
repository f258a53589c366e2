"""Simulated steps, compared with sums of their parts, and the bound on staleness."""

import time
from dataclasses import replace

import pytest

from search_r1.plan.simulation import EngineRates, Setup, SimulatedRun, StepCosts, simulate
from search_r1.plan.workload import Batch, Dialogue, LogNormal, Turn, Workload

RATES = EngineRates(step_s=0.01, sequence_s=0.001, prefill_tokens_s=10_000, slots=8)
COSTS = StepCosts(lambda batch: 20.0, lambda batch: 3.0, publish_s=2.0, adopt_s=1.0, switch_s=4.0)
SEPARATE = Setup(RATES, 1, COSTS, shares_cards=False)
SINGLE = Batch((Dialogue(100, (Turn(20, 50, 2.0), Turn(10))),), 1)
"""A batch of a single dialogue."""
ROLLOUT = 0.01 + 20.5 * 0.011 + 2.0 + 0.005 + 10.5 * 0.011
"""Seconds of that dialogue: prompt, turn, search, its observation, turn."""
WORKLOAD = Workload(
    512, 5, LogNormal(180, 180), LogNormal(100, 300), LogNormal(430, 430), (0.05, 0.35, 0.6),
    LogNormal(0.5, 5), 500, 500,
)  # fmt: skip


def test_a_step_on_shared_cards_is_the_sum_of_its_parts() -> None:
    """Nothing overlaps: rollout, driver, switch, training, weight transfer."""
    outcome = simulate(Setup(RATES, 1, COSTS), [SINGLE])
    assert outcome.rollout_s == pytest.approx(ROLLOUT)
    assert outcome.step_s == pytest.approx(ROLLOUT + 3 + 4 + 20 + 2 + 1)
    assert outcome.trainer_busy == pytest.approx(20 / outcome.step_s)
    assert outcome.engine_busy == pytest.approx((ROLLOUT - 2.0) / outcome.step_s)


def test_engines_and_ranks_on_separate_cards_overlap_only_with_staleness() -> None:
    """With staleness 1, the longer of training and rollout hides the other."""
    assert simulate(SEPARATE, [SINGLE]).step_s == pytest.approx(ROLLOUT + 3 + 20 + 2 + 1)
    stale = replace(SEPARATE, staleness=1)
    assert simulate(stale, [SINGLE]).step_s == pytest.approx(3 + 20 + 2)
    quick = replace(COSTS, train_s=lambda batch: 0.1, driver_s=lambda batch: 0.0, publish_s=0.1)
    outcome = simulate(replace(stale, costs=quick), [SINGLE], steps=40)
    assert outcome.step_s < 0.1 + 0.1 + 1.0 + ROLLOUT


@pytest.mark.parametrize("staleness", [0, 1, 3, 8])
def test_batches_start_with_weights_of_the_allowed_age(staleness: int) -> None:
    """Batch t + k starts when step t is published, so at most k + 1 batches are in progress."""
    batches = [replace(WORKLOAD, num_prompts=8).draw(seed) for seed in range(3)]
    run = SimulatedRun(replace(SEPARATE, num_engines=2, staleness=staleness), batches)
    for version in range(staleness + 7):
        run.advance_to(version)
        assert list(run.in_progress) == list(range(version, version + staleness + 1))


def test_rollouts_are_those_of_the_measured_steps() -> None:
    """Even if no rollout ends in these steps: the only one ended before, the next is long."""
    long = Batch((Dialogue(100, (Turn(20, 50, 60.0), Turn(10))),), 1)
    batches = [SINGLE, SINGLE, SINGLE, long]
    outcome = simulate(replace(SEPARATE, staleness=1), batches, steps=1)
    assert outcome.rollout_s == pytest.approx(COSTS.adopt_s + ROLLOUT)


def test_engines_read_the_context_again_after_new_weights() -> None:
    """Weights change during a search: before the second turn all tokens are read."""
    long = Batch((Dialogue(1000, (Turn(20, 500, 60.0), Turn(10))),), 1)
    setup = replace(SEPARATE, engine=replace(RATES, prefill_tokens_s=100))
    same = simulate(setup, [long])
    assert same.rollout_s == pytest.approx(1 + 10 + 20.5 * 0.011 + 60 + 5 + 10.5 * 0.011)
    changed = simulate(replace(setup, staleness=1), [long, SINGLE], 6)
    assert changed.rollout_s > (same.rollout_s + ROLLOUT) / 2 + 4


def test_members_of_a_group_read_their_prompt_once() -> None:
    """A group of five takes the time of one prompt."""
    group = Batch((Dialogue(5000, (Turn(10),)),) * 5, 5)
    outcome = simulate(Setup(RATES, 1, COSTS), [group])
    assert outcome.rollout_s == pytest.approx(0.5 + 10.5 * 0.015)


def test_a_step_of_the_published_size_is_simulated_quickly() -> None:
    """512 prompts x 5 dialogues take less than 2 s of processor time."""
    batch, rates = WORKLOAD.draw(0), replace(RATES, slots=320)
    start = time.process_time()
    simulate(Setup(rates, 8, COSTS), [batch], steps=1)
    assert time.process_time() - start < 2.0


def test_drawn_dialogues_have_the_described_distributions() -> None:
    """Shares of searches, medians, limits; the same seed gives the same batch."""
    batch = WORKLOAD.draw(1)
    assert batch == WORKLOAD.draw(1) != WORKLOAD.draw(2)
    searches = [len(dialogue.turns) - 1 for dialogue in batch.dialogues]
    assert searches.count(2) / len(searches) == pytest.approx(0.6, abs=0.03)
    tokens = sorted(turn.tokens for dialogue in batch.dialogues for turn in dialogue.turns)
    assert tokens[len(tokens) // 2] == pytest.approx(100, rel=0.05)
    assert tokens[int(0.99 * len(tokens))] == pytest.approx(300, rel=0.1)
    assert max(tokens) <= 500
    assert {dialogue.turns[-1].search_s for dialogue in batch.dialogues} == {0.0}
