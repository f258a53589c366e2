"""Simulated steps: sums by hand, limits that staleness cannot pass, and the bound on age."""

import time
from dataclasses import replace

import pytest

from search_r1.plan import simulation
from search_r1.plan.simulation import EngineRates, Setup, StepCosts, simulate
from search_r1.plan.workload import Batch, Dialogue, LogNormal, Turn, Workload

RATES = EngineRates(step_s=0.01, sequence_s=0.001, prefill_tokens_s=10_000, slots=8)
COSTS = StepCosts(lambda batch: 20.0, lambda batch: 3.0, publish_s=2.0, adopt_s=1.0, switch_s=4.0)
ONE = Batch((Dialogue(100, (Turn(20, 50, 2.0), Turn(10))),), 1)
ROLLOUT = 0.01 + 20.5 * 0.011 + 2.0 + 0.005 + 10.5 * 0.011
"""Of that one dialogue: prompt, turn, search, what it found, turn."""
LOAD = Workload(
    512, 5, LogNormal(180, 180), LogNormal(100, 300), LogNormal(430, 430), (0.05, 0.35, 0.6),
    LogNormal(0.5, 5), 500, 500,
)  # fmt: skip


def test_a_step_of_shared_cards_is_the_sum_of_its_parts() -> None:
    """Nothing overlaps: rollout, driver, switch, training, weight transfer."""
    found = simulate(Setup(RATES, 1, COSTS), [ONE])
    assert found.rollout_s == pytest.approx(ROLLOUT)
    assert found.step_s == pytest.approx(ROLLOUT + 3 + 4 + 20 + 2 + 1)
    assert found.trainer_busy == pytest.approx(20 / found.step_s)
    assert found.engine_busy == pytest.approx((ROLLOUT - 2.0) / found.step_s)


def test_cards_of_their_own_overlap_with_staleness_alone() -> None:
    """Staleness 0 is a sum again; with 1 a long training hides the rollout, a long rollout it."""
    split = Setup(RATES, 1, COSTS, shares_cards=False)
    assert simulate(split, [ONE]).step_s == pytest.approx(ROLLOUT + 3 + 20 + 2 + 1)
    assert simulate(replace(split, staleness=1), [ONE]).step_s == pytest.approx(3 + 20 + 2)
    quick = replace(COSTS, train_s=lambda batch: 0.1, driver_s=lambda batch: 0.0, publish_s=0.1)
    found = simulate(replace(split, staleness=1, costs=quick), [ONE], steps=40)
    assert found.step_s < 0.1 + 0.1 + 1.0 + ROLLOUT


@pytest.mark.parametrize("staleness", [0, 1, 3, 8])
@pytest.mark.parametrize("shares_cards", [True, False])
def test_batches_begin_with_weights_of_the_allowed_age(
    staleness: int, shares_cards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch t + k begins when step t is published, so k + 1 batches are in flight at most."""
    ages: list[int] = []
    flying: list[int] = []
    start = simulation._Run._start

    def noted(run: simulation._Run, number: int) -> None:
        start(run, number)
        ages.append(number - run.version)
        flying.append(len(run._flights))

    monkeypatch.setattr(simulation._Run, "_start", noted)
    batches = [replace(LOAD, num_prompts=8).draw(seed) for seed in range(3)]
    simulate(Setup(RATES, 2, COSTS, shares_cards, staleness), batches, steps=6)
    assert max(ages) == staleness
    assert max(flying) == staleness + 1


def test_new_weights_make_engines_read_the_context_again() -> None:
    """A dialogue that searches while weights change: its second turn reads all of its tokens."""
    long = Batch((Dialogue(1000, (Turn(20, 500, 60.0), Turn(10))),), 1)
    slow = replace(RATES, prefill_tokens_s=100)
    same = simulate(Setup(slow, 1, COSTS, shares_cards=False), [long])
    assert same.rollout_s == pytest.approx(1 + 10 + 20.5 * 0.011 + 60 + 5 + 10.5 * 0.011)
    changed = simulate(Setup(slow, 1, COSTS, shares_cards=False, staleness=1), [long, ONE], 6)
    assert changed.rollout_s > (same.rollout_s + ROLLOUT) / 2 + 4


def test_siblings_read_their_prompt_once() -> None:
    """A group of five takes one prompt's time."""
    five = Batch((Dialogue(5000, (Turn(10),)),) * 5, 5)
    found = simulate(Setup(RATES, 1, COSTS), [five])
    assert found.rollout_s == pytest.approx(0.5 + 10.5 * 0.015)


def test_a_step_of_the_published_size_is_simulated_quickly() -> None:
    """512 prompts x 5 dialogues within 2 s of CPU."""
    batch, rates = LOAD.draw(0), replace(RATES, slots=320)
    start = time.process_time()
    simulate(Setup(rates, 8, COSTS), [batch], steps=1)
    assert time.process_time() - start < 2.0


def test_drawn_dialogues_are_as_described() -> None:
    """Shares of searches, medians, limits; the same seed gives the same batch."""
    batch = LOAD.draw(1)
    assert batch == LOAD.draw(1) != LOAD.draw(2)
    searches = [len(one.turns) - 1 for one in batch.dialogues]
    assert searches.count(2) / len(searches) == pytest.approx(0.6, abs=0.03)
    tokens = sorted(turn.tokens for one in batch.dialogues for turn in one.turns)
    assert tokens[len(tokens) // 2] == pytest.approx(100, rel=0.05)
    assert tokens[int(0.99 * len(tokens))] == pytest.approx(300, rel=0.1)
    assert max(tokens) <= 500
    assert {one.turns[-1].search_s for one in batch.dialogues} == {0.0}
