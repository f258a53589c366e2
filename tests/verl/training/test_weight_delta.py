"""Encoded weight changes: applied to the old weights they give the new ones, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from verl.training.weight_broadcast import BITS, CHANGES, KeptWeights, apply_changes, encode_changes

DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])
SPECIAL = [0.0, -0.0, float("nan"), float("inf"), 1.0, -1.0]


def random_bits(num: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Draw elements with random bits, including various NaNs and subnormal numbers."""
    draw = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (num * dtype.itemsize,), generator=draw, dtype=torch.uint8)
    return raw.view(dtype)


def same_bits(x: Tensor, y: Tensor) -> bool:
    assert x.dtype == y.dtype and x.shape == y.shape
    return torch.equal(x.view(BITS[x.itemsize]), y.view(BITS[x.itemsize]))


@given(DTYPES, st.integers(1, 200_000), st.sampled_from([0, 1e-4, 0.01, 0.4, 1]), st.integers(0))
def test_changes_turn_the_old_tensor_into_the_new_one(
    dtype: torch.dtype, num: int, share: float, seed: int
) -> None:
    """Bit for bit, for any bits and any changes; the encoding is never larger than the tensor."""
    seed %= 1 << 62
    old, other = random_bits(num, dtype, seed), random_bits(num, dtype, seed + 1)
    draw = torch.rand(num, generator=torch.Generator().manual_seed(seed)) < share
    new = torch.where(draw, other.view(BITS[dtype.itemsize]), old.view(BITS[dtype.itemsize]))
    new = new.view(dtype)
    encoded, num_changed = encode_changes(old, new)
    bytes_differ = old.view(torch.uint8) != new.view(torch.uint8)
    assert num_changed == int(bytes_differ.view(num, -1).any(1).sum())
    if encoded.dtype != CHANGES:
        assert encoded is new
        return
    assert encoded.nbytes < new.nbytes
    updated = old.clone()
    apply_changes(updated, encoded)
    assert same_bits(updated, new)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bits_are_compared_rather_than_numbers(dtype: torch.dtype) -> None:
    """0.0 replaced by -0.0 is a change, and NaN replaced by the same NaN is none."""
    old = torch.tensor(SPECIAL * 100, dtype=dtype)
    new = old.clone()
    new[0], new[7], new[8] = -0.0, 0.0, float("nan")
    encoded, num_changed = encode_changes(old, new)
    assert num_changed == 2 and encoded.nbytes == 4 + 2 * (dtype.itemsize + 2)
    apply_changes(old, encoded)
    assert same_bits(old, new)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 1 / 2), (torch.float32, 2 / 3)])
def test_many_changes_are_sent_as_a_whole_tensor(dtype: torch.dtype, limit: float) -> None:
    """From the share on at which positions and values have as many bytes as the tensor."""
    old = torch.zeros(60_000, dtype=dtype)
    for share, is_whole in ((limit - 0.001, False), (limit, True)):
        new = old.clone()
        new[: round(share * len(old))] = 1
        assert (encode_changes(old, new)[0] is new) == is_whole


def test_both_ends_keep_the_same() -> None:
    """After each of several versions; unchanged tensors are not sent.

    Kept weights share no memory with the model, which training changes in place.
    """
    sender, receiver = KeptWeights(), KeptWeights()
    model = {"a": torch.randn(500, 30).T, "b": torch.tensor(2.0), "c": torch.zeros(9)}
    for step in range(5):
        for name, tensor in model.items():
            update, num_changed = sender.replace(name, tensor)
            assert (update is None) == (step > 0 and num_changed == 0)
            assert num_changed == (tensor.numel() if not step else {"a": 2, "b": 1, "c": 0}[name])
            if update is not None:
                receiver.apply(name, update.clone())
        for name, tensor in model.items():
            assert same_bits(receiver.tensors[name], tensor.contiguous())
        model["a"][step, 2:4] += 1.0
        model["b"] += 1.0
