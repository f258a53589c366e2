"""Losses do not depend on order, packing, number of ranks, and values at observation tokens.

Every row of every registry is a case. A loss is computed as the trainer does it: weights over the
whole mini-batch, losses on the policy tokens of whatever sequences are at hand.
"""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.core.jagged_batches import DIALOGUES, Batch, batches
from verl.batch import TokenBatch
from verl.core_algos.jagged import sequence_ids
from verl.core_algos.kl import KL_KINDS, kl_penalty
from verl.core_algos.losses import AGGREGATIONS, loss_weights, value_loss, weighted_sum
from verl.core_algos.mismatch import LEVELS, importance_weights
from verl.core_algos.policy_losses import POLICY_LOSSES, PolicyLossInputs, likelihood_loss
from verl.packing import pack, split_by_work

TokenLoss = Callable[[TokenBatch], Tensor]
"""Losses by name, computed for a batch's policy tokens, (num_policy_tokens,)."""


def at_policy(batch: TokenBatch, name: str) -> Tensor:
    return batch.tokens[name][batch.tokens["policy_mask"]]


def ids_at_policy(batch: TokenBatch) -> Tensor:
    return sequence_ids(batch.offsets)[batch.tokens["policy_mask"]]


def turns(batch: TokenBatch) -> Tensor:
    """Number the runs of policy tokens within sequences, by a loop over tokens."""
    numbers, current, previous = [], -1, (-1, False)
    mask = batch.tokens["policy_mask"].tolist()
    for sequence, is_policy in zip(sequence_ids(batch.offsets).tolist(), mask, strict=True):
        if is_policy and previous != (sequence, True):
            current += 1
        numbers += [current] if is_policy else []
        previous = (sequence, is_policy)
    return torch.tensor(numbers, dtype=torch.int64)


def policy_loss(batch: TokenBatch, name: str) -> Tensor:
    inputs = PolicyLossInputs(
        at_policy(batch, "log_probs"), at_policy(batch, "old"), at_policy(batch, "advantages"),
        ids_at_policy(batch), 0.1, 0.2,
    )  # fmt: skip
    return POLICY_LOSSES[name](inputs)[0]


def value(batch: TokenBatch) -> Tensor:
    columns = (at_policy(batch, name) for name in ("log_probs", "old", "returns"))
    return value_loss(*columns, clip_range=0.5)


def kl(batch: TokenBatch, kind: str) -> Tensor:
    return kl_penalty(at_policy(batch, "log_probs"), at_policy(batch, "reference"), kind)


def llds(batch: TokenBatch, gate: Callable[[TokenBatch], Tensor]) -> Tensor:
    kept = at_policy(batch, "advantages") >= 0
    log_probs, old = at_policy(batch, "log_probs"), at_policy(batch, "old")
    return likelihood_loss(log_probs, old, kept, gate(batch))


def mismatch(batch: TokenBatch, level: str) -> Tensor:
    old, engine = at_policy(batch, "old"), at_policy(batch, "engine")
    weights = importance_weights(old, engine, ids_at_policy(batch), level, 2.0, 4.0)
    return weights * policy_loss(batch, "ppo")


CASES: dict[str, TokenLoss] = {
    "value": value,
    "llds/turn": lambda b: llds(b, turns),
    "llds/trajectory": lambda b: llds(b, ids_at_policy),
    **{f"policy/{n}": lambda b, n=n: policy_loss(b, n) for n in POLICY_LOSSES},
    **{f"kl/{k}": lambda b, k=k: kl(b, k) for k in KL_KINDS},
    **{f"mismatch/{m}": lambda b, m=m: mismatch(b, m) for m in LEVELS},
}
every_case = pytest.mark.parametrize("case", list(CASES))


def data_of(batch: Batch, aggregation: str) -> TokenBatch:
    """Make a mini-batch with random columns, loss weights, and a leaf tensor `log_probs`."""
    near = batch.column(1)
    columns = {
        "policy_mask": batch.mask,
        "old": near,
        "log_probs": (near + batch.column(2, 0.3)).requires_grad_(),
        "advantages": batch.column(3),
        "returns": batch.column(4),
        "reference": near + batch.column(5, 0.3),
        "engine": near + batch.column(6, 0.3),
        "weights": loss_weights(batch.mask, batch.offsets, aggregation, 7.0).double(),
    }
    return TokenBatch(batch.offsets, columns)


def total(parts: Sequence[TokenBatch], case: str) -> Tensor:
    """Compute the loss of a mini-batch that was split into `parts`."""
    losses = (weighted_sum(CASES[case](part), at_policy(part, "weights")) for part in parts)
    return torch.stack(list(losses)).sum()


def assert_same(parts: Sequence[TokenBatch], whole: TokenBatch, case: str) -> None:
    """Assert that loss and gradient of the parts are those of the whole."""
    leaf, results = whole.tokens["log_probs"], []
    for batch in (parts, [whole]):
        loss = total(batch, case)
        results.append((loss.detach(), *torch.autograd.grad(loss, leaf)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-9)


def draw_batch(batch: Batch, data: st.DataObject) -> TokenBatch:
    return data_of(batch, data.draw(st.sampled_from(AGGREGATIONS)))


@every_case
@given(batch=batches, data=st.data())
def test_order_packing_and_ranks_change_nothing(
    case: str, batch: Batch, data: st.DataObject
) -> None:
    """Parts have the loss of the whole, and each token its gradient; parts may be empty.

    Sequences are in another order, in micro-batches of any token budget, or on several ranks.
    """
    whole = draw_batch(batch, data)
    match data.draw(st.sampled_from(["order", "micro-batches", "ranks"])):
        case "order":
            parts = [whole.select(data.draw(st.permutations(range(len(whole)))))]
        case "micro-batches":
            bins = pack(whole.lengths.tolist(), data.draw(st.integers(1, 30)), min_count=3)
            parts = [whole.select(indices) for indices in bins]
        case _:
            parts = split_by_work(whole, data.draw(st.integers(1, 8))).shards
    assert_same(parts, whole, case)


@every_case
@pytest.mark.parametrize("junk", [1e3, math.nan, math.inf])
def test_line_03_no_loss_reads_an_observation(case: str, junk: float) -> None:
    """Values at tokens off the policy change neither loss nor gradient, which is 0 there."""
    plain = data_of(DIALOGUES, "token-mean")
    mask = DIALOGUES.mask
    spoilt = {
        name: torch.where(mask, column.detach(), junk)
        for name, column in plain.tokens.items()
        if name != "policy_mask"
    }
    leaf = spoilt["log_probs"].requires_grad_()
    other = TokenBatch(DIALOGUES.offsets, {**spoilt, "policy_mask": mask})
    (gradient,) = torch.autograd.grad(total([other], case), leaf)
    (expected,) = torch.autograd.grad(total([plain], case), plain.tokens["log_probs"])
    assert torch.equal(total([other], case), total([plain], case))
    assert torch.equal(gradient, expected)
    assert not gradient[~mask].any()
