"""Jagged helpers and advantages against slow, obvious loops in double precision."""

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.verl.jagged_batches import CLOSE, DIALOGUES, Batch, batches, fast, make_batch
from verl.core_algos.advantages import (
    ADVANTAGES,
    AdvantageInputs,
    Advantages,
    compute_gae_advantage,
    compute_grpo_advantage,
    dense_group_ids,
)
from verl.core_algos.jagged import (
    last_policy_token,
    masked_whiten,
    outcome_to_tokens,
    segment_sum,
    sequence_ids,
)


def gae_by_loop(
    rewards: list[float], values: list[float], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """Advantages as the sum of discounted TD errors, straight from the definition."""
    n = len(rewards)
    after = [*values[1:], 0.0]
    deltas = [rewards[t] + gamma * after[t] - values[t] for t in range(n)]
    advantages = [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def permuted(batch: Batch, order: Sequence[int]) -> tuple[Batch, Tensor]:
    """The sequences in another order, and the flat index that brings columns along."""
    spans = batch.spans
    index = torch.tensor([t for i in order for t in range(*spans[i])], dtype=torch.int64)
    masks = [batch.mask[slice(*spans[i])].tolist() for i in order]
    return make_batch(masks, batch.seed), index


@fast
@given(batches)
def test_jagged_helpers_agree_with_loops(batch: Batch) -> None:
    """Sequence ids, sums, last policy tokens and outcome placement are those of plain loops."""
    x = batch.column(1)
    ids = [i for i, (a, b) in enumerate(batch.spans) for _ in range(a, b)]
    assert sequence_ids(batch.offsets).tolist() == ids
    sums = torch.tensor([float(x[a:b].sum()) for a, b in batch.spans], dtype=torch.float64)
    torch.testing.assert_close(segment_sum(x, batch.offsets), sums, **CLOSE)
    last = [p[-1] if p else -1 for p in batch.policy_positions()]
    assert last_policy_token(batch.mask, batch.offsets).tolist() == last
    scores = torch.arange(1.0, batch.num_seqs + 1)
    expected = torch.zeros(batch.mask.numel())
    for i, position in enumerate(last):
        if position >= 0:
            expected[position] = scores[i]
    assert torch.equal(outcome_to_tokens(scores, batch.mask, batch.offsets), expected)


@fast
@given(batches)
def test_masked_whiten_uses_masked_mean_and_unbiased_variance(batch: Batch) -> None:
    """Whitening is numpy's (x - mean) / std(ddof=1) over the mask and 0 elsewhere."""
    x = batch.column(1, scale=3.0) + 2.0
    chosen = x[batch.mask].numpy()
    expected = np.zeros(x.numel())
    if chosen.size > 1:
        expected[batch.mask.numpy()] = (chosen - chosen.mean()) / np.sqrt(chosen.var(ddof=1) + 1e-8)
    torch.testing.assert_close(masked_whiten(x, batch.mask), torch.from_numpy(expected), **CLOSE)


@pytest.mark.parametrize("gamma", [0.99, 1.0])
@pytest.mark.parametrize("lam", [0.9, 0.95, 1.0])
@fast
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
    """With values 0 the first token sees the outcome through γλ per later policy token."""
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
    """Values, and rewards of tokens off the policy, are never read by any estimator."""
    estimator = ADVANTAGES[name]
    inputs = AdvantageInputs(
        token_rewards=DIALOGUES.column(1),
        policy_mask=DIALOGUES.mask,
        offsets=DIALOGUES.offsets,
        values=DIALOGUES.column(2),
        group_ids=["g", "g", "g", "h"],
        gamma=0.99,
        lam=0.95,
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


def grpo_by_loop(
    scores: Sequence[float], ids: Sequence[Hashable], members: Sequence[bool], norm_by_std: bool
) -> list[float]:
    """Group-relative scores with numpy's mean and std(ddof=1), group by group."""
    groups: dict[Hashable, list[float]] = defaultdict(list)
    for score, group, is_member in zip(scores, ids, members, strict=True):
        if is_member:
            groups[group].append(score)
    out = []
    for score, group in zip(scores, ids, strict=True):
        several = len(groups[group]) > 1
        mean = np.mean(groups[group]) if several else 0.0
        std = np.std(groups[group], ddof=1) if several else 1.0
        out.append((score - mean) / (std + 1e-6) if norm_by_std else score - mean)
    return out


@fast
@given(batches, st.data(), st.booleans())
def test_grpo_agrees_with_numpy_by_group(batch: Batch, data: st.DataObject, norm: bool) -> None:
    """Advantages are (score - mean) / (std + 1e-6) of the group, at policy tokens only."""
    ids = data.draw(st.lists(st.sampled_from(["a", "b", 1, ("a", 1)]), min_size=batch.num_seqs,
                             max_size=batch.num_seqs))  # fmt: skip
    scores = batch.column(1).new_tensor(np.random.default_rng(batch.seed).random(batch.num_seqs))
    got = compute_grpo_advantage(scores, ids, batch.mask, batch.offsets, norm)
    positions = batch.policy_positions()
    by_sequence = grpo_by_loop(scores.tolist(), ids, [bool(p) for p in positions], norm)
    expected = torch.zeros(batch.mask.numel(), dtype=torch.float64)
    for own, advantage in zip(positions, by_sequence, strict=True):
        expected[own] = advantage
    torch.testing.assert_close(got, expected, **CLOSE)


def test_grpo_leaves_failed_trajectories_out_of_their_group() -> None:
    """A sequence without policy tokens (infrastructure failed) does not move its group's mean."""
    batch = make_batch([[True], [True], [False]])
    scores = torch.tensor([1.0, 0.0, -50.0], dtype=torch.float64)
    got = compute_grpo_advantage(scores, [0, 0, 0], batch.mask, batch.offsets, False)
    assert got.tolist() == [0.5, -0.5, 0.0]


def test_grpo_group_of_one_keeps_its_score() -> None:
    """A lone sample has mean 0 and deviation 1 by convention; a constant group gets 0."""
    batch = make_batch([[True], [True], [True]])
    scores = torch.tensor([0.7, 1.0, 1.0], dtype=torch.float64)
    got = compute_grpo_advantage(scores, ["x", "y", "y"], batch.mask, batch.offsets)
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
    """Groups are told apart by the whole id, whatever its type."""
    batch = make_batch([[True]] * 4)
    scores = torch.tensor([0.0, 1.0, 10.0, 30.0], dtype=torch.float64)
    got = compute_grpo_advantage(scores, ids, batch.mask, batch.offsets, norm_by_std=False)
    assert got.tolist() == [-0.5, 0.5, -10.0, 10.0]
    assert dense_group_ids([1, "1", (1,)], torch.device("cpu")).tolist() == [0, 1, 2]


def test_grpo_refuses_ids_that_do_not_fit() -> None:
    """One id a sequence, or an error that says so."""
    batch = make_batch([[True], [True]])
    with pytest.raises(ValueError, match="got 1 group ids for 2 scores"):
        compute_grpo_advantage(torch.zeros(2), ["x"], batch.mask, batch.offsets)


@pytest.mark.parametrize("name", list(ADVANTAGES))
@fast
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
        inputs = AdvantageInputs(r, b.mask, b.offsets, v, g, gamma=0.99, lam=0.95)
        return ADVANTAGES[name].compute(inputs)

    plain = run(batch, rewards, values, ids)
    moved = run(other, rewards[index], values[index], [ids[i] for i in order])
    # Summation order may differ; whitening two nearly equal numbers magnifies that.
    torch.testing.assert_close(moved.advantages, plain.advantages[index], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(moved.returns, plain.returns[index], rtol=1e-6, atol=1e-6)


def test_registry_rows_name_what_they_need() -> None:
    """The trainer reads from the row whether to run a critic and whether to group."""
    needs = {n: (row.needs_critic, row.needs_groups) for n, row in ADVANTAGES.items()}
    assert needs == {"gae": (True, False), "grpo": (False, True)}
    assert all(name == row.name for name, row in ADVANTAGES.items())
