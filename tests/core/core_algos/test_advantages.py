"""Advantage estimators, compared with plain loops in double precision."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.core.jagged_batches import CLOSE, DIALOGUES, Batch, batches, make_batch
from verl.core_algos.advantages import (
    ADVANTAGES,
    AdvantageEstimator,
    AdvantageInputs,
    Advantages,
    Gae,
    _policy_grid,
    compute_gae_advantage,
)
from verl.core_algos.jagged import (
    outcome_to_tokens,
)


def gae_by_loop(
    rewards: list[float], values: list[float], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """Compute advantages by definition, as sums of discounted TD errors."""
    n = len(rewards)
    after = [*values[1:], 0.0]
    deltas = [rewards[t] + gamma * after[t] - values[t] for t in range(n)]
    advantages = [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def permuted(batch: Batch, order: Sequence[int]) -> tuple[Batch, Tensor]:
    """Reorder the sequences; also return the flat index that reorders token columns."""
    spans = batch.spans
    index = torch.tensor([t for i in order for t in range(*spans[i])], dtype=torch.int64)
    masks = [batch.mask[slice(*spans[i])].tolist() for i in order]
    return make_batch(masks, batch.seed), index


@pytest.mark.parametrize("gamma", [0.99, 1.0])
@pytest.mark.parametrize("lam", [0.9, 0.95, 1.0])
@given(batches)
def test_line_04_gae_is_that_of_the_compressed_sequence(
    gamma: float, lam: float, batch: Batch
) -> None:
    """GAE over policy tokens crosses observations in one step, and is 0 off the policy."""
    rewards, values = batch.column(1), batch.column(2)
    advantages, returns = compute_gae_advantage(
        rewards, values, batch.mask, batch.offsets, gamma, lam
    )
    expected_a, expected_r = torch.zeros_like(values), torch.zeros_like(values)
    for positions in batch.policy_positions():
        a, r = gae_by_loop(rewards[positions].tolist(), values[positions].tolist(), gamma, lam)
        expected_a[positions] = torch.tensor(a, dtype=torch.float64)
        expected_r[positions] = torch.tensor(r, dtype=torch.float64)
    torch.testing.assert_close(advantages, expected_a, **CLOSE)
    torch.testing.assert_close(returns, expected_r, **CLOSE)


def test_line_04_outcome_decays_by_policy_tokens_only() -> None:
    """With values of 0, the first token gets the outcome times γλ per later policy token."""
    rewards = outcome_to_tokens(
        torch.tensor([1.0, 0.0, 7.0, 7.0]), DIALOGUES.mask, DIALOGUES.offsets
    )
    assert rewards.nonzero().flatten().tolist() == [7]
    advantages, _ = compute_gae_advantage(
        rewards, torch.zeros(13), DIALOGUES.mask, DIALOGUES.offsets, gamma=0.9, lam=0.5
    )
    assert advantages[[2, 3, 7]].tolist() == pytest.approx([0.45**2, 0.45, 1.0])


@pytest.mark.parametrize("junk", [1e3, math.nan, math.inf])
@pytest.mark.parametrize("name", list(ADVANTAGES))
def test_line_03_observation_values_change_no_advantage(name: str, junk: float) -> None:
    """No estimator reads values and rewards of tokens off the policy."""
    estimator = ADVANTAGES[name]
    inputs = AdvantageInputs(
        token_rewards=DIALOGUES.column(1),
        policy_mask=DIALOGUES.mask,
        offsets=DIALOGUES.offsets,
        values=DIALOGUES.column(2),
        group_ids=["g", "g", "g", "h"],
        gamma=0.99,
        gae=Gae(0.95),
    )
    spoilt = replace(
        inputs,
        values=torch.where(DIALOGUES.mask, DIALOGUES.column(2), junk),
        token_rewards=torch.where(DIALOGUES.mask, DIALOGUES.column(1), junk),
    )
    before, after = estimator.compute(inputs), estimator.compute(spoilt)
    assert torch.equal(before.advantages, after.advantages)
    assert torch.equal(before.returns, after.returns)
    assert not before.advantages[~DIALOGUES.mask].any()
    assert not before.returns[~DIALOGUES.mask].any()


def group_of(scores: Sequence[float], ids: Sequence[Hashable], i: int) -> list[int]:
    """Return the members of i's group, by a plain search."""
    return [j for j in range(len(scores)) if ids[j] == ids[i] and not math.isnan(scores[j])]


def sequence_advantage(
    name: str, scores: Sequence[float], ids: Sequence[Hashable], lengths: Sequence[int], i: int
) -> float:
    """Compute a sequence's advantage by the published formula in numpy; nan scores do not count."""
    group = group_of(scores, ids, i)
    own, others = scores[i], [scores[j] for j in group if j != i]
    several = len(group) > 1
    everyone = [scores[j] for j in group]
    mean = np.mean(everyone) if several else 0.0
    match name:
        case "grpo":
            return (own - mean) / ((np.std(everyone, ddof=1) if several else 1.0) + 1e-6)
        case "dr_grpo":
            return own - mean
        case "rloo":
            return own - (np.mean(others) if several else 0.0)
        case "grpo_passk":
            second = max(others) if several else 0.0
            lead = own - second if own > second or not several else 0.0
            return lead / ((np.std(everyone, ddof=1) if several else 1.0) + 1e-6)
        case "opo":
            weights = [lengths[j] for j in group]
            return own - (np.average(everyone, weights=weights) if several else 0.0)
    raise AssertionError(name)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo", "grpo_passk"])
@given(batches, st.data())
def test_group_estimators_follow_their_formulas(
    name: str, batch: Batch, data: st.DataObject
) -> None:
    """Each policy token gets its sequence's score relative to its group, others 0."""
    ids = data.draw(st.lists(st.sampled_from(["a", "b", 1, ("a", 1)]), min_size=batch.num_seqs,
                             max_size=batch.num_seqs))  # fmt: skip
    positions = batch.policy_positions()
    rewards = batch.column(1)
    scores = [float(rewards[p].sum()) if p else math.nan for p in positions]
    lengths = [len(p) for p in positions]
    got = ADVANTAGES[name].compute(
        AdvantageInputs(rewards, batch.mask, batch.offsets, group_ids=ids)
    )
    expected = torch.zeros(batch.mask.numel(), dtype=torch.float64)
    for i, own in enumerate(positions):
        if own:
            expected[own] = sequence_advantage(name, scores, ids, lengths, i)
    torch.testing.assert_close(got.advantages, expected, **CLOSE)


def whitened(x: Tensor, mask: Tensor) -> Tensor:
    """Compute (x - mean) / sqrt(var + 1e-8) of the masked entries in numpy, 0 elsewhere."""
    out, chosen = torch.zeros_like(x), x[mask].numpy()
    if chosen.size:
        variance = chosen.var(ddof=1) if chosen.size > 1 else 0.0
        out[mask] = torch.tensor((chosen - chosen.mean()) / math.sqrt(variance + 1e-8))
    return out


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@given(batches)
def test_reinforce_estimators_follow_their_formulas(gamma: float, batch: Batch) -> None:
    """Returns by a loop: plain, less the batch's mean score, or whitened."""
    positions, rewards = batch.policy_positions(), batch.column(1)
    returns, seen = torch.zeros_like(rewards), []
    for own in positions:
        for rank, t in enumerate(own):
            returns[t] = sum(
                float(rewards[u]) * gamma ** (k - rank) for k, u in enumerate(own) if k >= rank
            )
        seen += [float(rewards[own].sum())] if own else []
    inputs = AdvantageInputs(rewards, batch.mask, batch.offsets, gamma=gamma)
    baseline = float(np.mean(seen)) if seen else 0.0
    expected = {
        "reinforce": returns,
        "reinforce_baseline": torch.where(batch.mask, returns - baseline, 0.0),
        "reinforce_plus_plus": whitened(returns, batch.mask),
    }
    for name, column in expected.items():
        torch.testing.assert_close(ADVANTAGES[name].compute(inputs).advantages, column, **CLOSE)


@given(batches, st.data())
def test_reinforce_plus_plus_baseline_whitens_centred_scores(
    batch: Batch, data: st.DataObject
) -> None:
    """Scores less their group's mean are whitened over all policy tokens of the batch."""
    ids = data.draw(
        st.lists(st.sampled_from("abc"), min_size=batch.num_seqs, max_size=batch.num_seqs)
    )
    rewards, positions = batch.column(1), batch.policy_positions()
    scores = [float(rewards[p].sum()) if p else math.nan for p in positions]
    centred = torch.zeros_like(rewards)
    for i, own in enumerate(positions):
        if own:
            centred[own] = sequence_advantage("dr_grpo", scores, ids, [], i)
    inputs = AdvantageInputs(rewards, batch.mask, batch.offsets, group_ids=ids)
    got = ADVANTAGES["reinforce_plus_plus_baseline"].compute(inputs).advantages
    torch.testing.assert_close(got, whitened(centred, batch.mask), rtol=1e-6, atol=1e-6)


def test_pass_at_k_rewards_the_best_by_its_lead() -> None:
    """Of (3, 1, 2) only the first gets an advantage, of 1; of two best scores neither does."""
    batch = make_batch([[True]] * 6)
    scores = torch.tensor([3.0, 1.0, 2.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    got = by_scores(scores, list("aaabbb"), batch, "grpo_passk")
    assert got.tolist() == pytest.approx([1.0, 0, 0, 0, 0, 0])  # the deviation of (3, 1, 2) is 1


@pytest.mark.parametrize("over_all", [(False, False), (True, False), (True, True)])
@given(batch=batches, data=st.data())
def test_gae_whitens_over_the_given_tokens(
    over_all: tuple[bool, bool], batch: Batch, data: st.DataObject
) -> None:
    """The estimator is GAE with whitening, over policy tokens or over more tokens, by loops."""
    size = batch.mask.numel()
    extra = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    wider = batch.mask | torch.tensor(extra, dtype=torch.bool)
    steps, spread = (wider if wide else batch.mask for wide in over_all)
    rewards, values = torch.where(batch.mask, batch.column(1), 0.0), batch.column(2)
    raw, returns = torch.zeros_like(values), torch.zeros_like(values)
    for a, b in batch.spans:
        own = [t for t in range(a, b) if steps[t]]
        found = gae_by_loop(rewards[own].tolist(), values[own].tolist(), 0.99, 0.95)
        raw[own], returns[own] = (torch.tensor(x, dtype=torch.float64) for x in found)
    inputs = AdvantageInputs(
        rewards, batch.mask, batch.offsets, values, gamma=0.99,
        gae=Gae(0.95, steps if over_all[0] else None, spread if over_all[1] else None),
    )  # fmt: skip
    got = ADVANTAGES["gae"].compute(inputs)
    expected = torch.where(batch.mask, whitened(raw, spread), 0.0)
    torch.testing.assert_close(got.advantages, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got.returns, returns, **CLOSE)


def by_scores(scores: Tensor, ids: Sequence[Hashable] | Tensor, batch: Batch, name: str) -> Tensor:
    """Compute a group estimator's advantages with each score on the last policy token."""
    rewards = outcome_to_tokens(scores, batch.mask, batch.offsets)
    inputs = AdvantageInputs(rewards, batch.mask, batch.offsets, group_ids=ids)
    return ADVANTAGES[name].compute(inputs).advantages


def test_grpo_group_of_one_keeps_its_score() -> None:
    """A single sample has mean 0 and deviation 1 by convention; a constant group gets 0."""
    batch = make_batch([[True], [True], [True]])
    scores = torch.tensor([0.7, 1.0, 1.0], dtype=torch.float64)
    got = by_scores(scores, ["x", "y", "y"], batch, "grpo")
    assert got.tolist() == pytest.approx([0.7 / (1 + 1e-6), 0.0, 0.0])


@pytest.mark.parametrize(
    "ids",
    [
        [("nq", 3), ("nq", 3), ("hotpotqa", 3), ("hotpotqa", 3)],
        ["nq/3", "nq/3", "hotpotqa/3", "hotpotqa/3"],
        torch.tensor([7, 7, 2, 2]),
    ],
)
def test_line_11_same_index_of_two_data_sets_is_two_groups(ids: Sequence[Hashable]) -> None:
    """Groups are distinguished by the whole id, whatever its type."""
    batch = make_batch([[True]] * 4)
    scores = torch.tensor([0.0, 1.0, 10.0, 30.0], dtype=torch.float64)
    got = by_scores(scores, ids, batch, "dr_grpo")
    assert got.tolist() == [-0.5, 0.5, -10.0, 10.0]


@pytest.mark.parametrize("name", list(ADVANTAGES))
@given(batch=batches, data=st.data())
def test_advantages_do_not_depend_on_the_order_of_sequences(
    name: str, batch: Batch, data: st.DataObject
) -> None:
    """Reordering sequences reorders their advantages and changes nothing else (line 11)."""
    order = data.draw(st.permutations(range(batch.num_seqs)))
    other, index = permuted(batch, order)
    ids = [i // 2 for i in range(batch.num_seqs)]
    rewards, values = batch.column(1), batch.column(2)

    def run(b: Batch, r: Tensor, v: Tensor, g: list[int]) -> Advantages:
        inputs = AdvantageInputs(r, b.mask, b.offsets, v, g, gamma=0.99, gae=Gae(0.95))
        return ADVANTAGES[name].compute(inputs)

    plain = run(batch, rewards, values, ids)
    moved = run(other, rewards[index], values[index], [ids[i] for i in order])
    # The order of sums may differ; whitening amplifies the difference of nearly equal numbers.
    torch.testing.assert_close(moved.advantages, plain.advantages[index], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(moved.returns, plain.returns[index], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("row", ADVANTAGES.values(), ids=list(ADVANTAGES))
def test_registry_entries_declare_their_inputs(row: AdvantageEstimator) -> None:
    """An estimator works with the inputs it declares, and fails without any of them."""
    optional = {
        "needs_critic": ("values", DIALOGUES.column(2)),
        "needs_groups": ("group_ids", ["g", "g", "g", "h"]),
    }
    needed = dict(value for name, value in optional.items() if getattr(row, name))
    inputs = AdvantageInputs(DIALOGUES.column(1), DIALOGUES.mask, DIALOGUES.offsets, **needed)
    assert row.compute(inputs).advantages.shape == DIALOGUES.mask.shape
    for name in needed:
        with pytest.raises(AssertionError, match=name):
            row.compute(replace(inputs, **{name: None}))


@given(batches)
def test_the_grid_of_gae_is_as_wide_as_the_longest_sequence(batch: Batch) -> None:
    """Columns restart at each sequence: else memory would grow with the square of the batch."""
    rows, columns = _policy_grid(batch.mask, batch.offsets)
    spans = enumerate(batch.spans)
    cells = [(row, n) for row, span in spans for n in range(int(batch.mask[slice(*span)].sum()))]
    assert list(zip(rows.tolist(), columns.tolist(), strict=True)) == cells
