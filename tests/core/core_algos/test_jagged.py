"""Sums, last tokens, outcomes and whitening in jagged batches, compared with loops and numpy."""

import numpy as np
import torch
from hypothesis import given

from tests.core.jagged_batches import CLOSE, Batch, batches
from verl.core_algos.jagged import (
    has_policy_token,
    last_policy_token,
    masked_whiten,
    outcome_to_tokens,
    segment_sum,
    sequence_ids,
    sum_by_id,
)


@given(batches)
def test_jagged_helpers_agree_with_loops(batch: Batch) -> None:
    """Sequence ids, sums, last policy tokens and outcome placement are those of plain loops."""
    x = batch.column(1)
    ids = [i for i, (a, b) in enumerate(batch.spans) for _ in range(a, b)]
    assert sequence_ids(batch.offsets).tolist() == ids
    sums = torch.tensor([float(x[a:b].sum()) for a, b in batch.spans], dtype=torch.float64)
    torch.testing.assert_close(segment_sum(x, batch.offsets), sums, **CLOSE)
    by_token = [float(x[a:b].sum()) for a, b in batch.spans for _ in range(a, b)]
    found = sum_by_id(x, sequence_ids(batch.offsets))
    torch.testing.assert_close(found, torch.tensor(by_token, dtype=torch.float64), **CLOSE)
    last = [p[-1] if p else -1 for p in batch.policy_positions()]
    assert last_policy_token(batch.mask, batch.offsets).tolist() == last
    assert has_policy_token(batch.mask, batch.offsets).tolist() == [x >= 0 for x in last]
    scores = torch.arange(1.0, batch.num_seqs + 1)
    expected = torch.zeros(batch.mask.numel())
    for i, position in enumerate(last):
        if position >= 0:
            expected[position] = scores[i]
    assert torch.equal(outcome_to_tokens(scores, batch.mask, batch.offsets), expected)


@given(batches)
def test_masked_whiten_uses_masked_mean_and_unbiased_variance(batch: Batch) -> None:
    """Whitening is numpy's (x - mean) / std(ddof=1) over the mask and 0 elsewhere."""
    x = batch.column(1, scale=3.0) + 2.0
    chosen = x[batch.mask].numpy()
    expected = np.zeros(x.numel())
    if chosen.size > 1:
        expected[batch.mask.numpy()] = (chosen - chosen.mean()) / np.sqrt(chosen.var(ddof=1) + 1e-8)
    torch.testing.assert_close(masked_whiten(x, batch.mask), torch.from_numpy(expected), **CLOSE)
