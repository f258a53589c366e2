"""Weights as changes of those before: what is sent makes of the old ones the new, bit for bit."""

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
    """Elements of any bits at all: NaN of many kinds too, and numbers below the normal ones."""
    draw = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (num * dtype.itemsize,), generator=draw, dtype=torch.uint8)
    return raw.view(dtype)


def same_bits(one: Tensor, other: Tensor) -> bool:
    assert one.dtype == other.dtype and one.shape == other.shape
    return torch.equal(one.view(BITS[one.itemsize]), other.view(BITS[one.itemsize]))


@given(DTYPES, st.integers(1, 200_000), st.sampled_from([0, 1e-4, 0.01, 0.4, 1]), st.integers(0))
def test_changes_make_the_new_tensor_of_the_old_one(
    dtype: torch.dtype, num: int, share: float, seed: int
) -> None:
    """Bit for bit, whatever the bits are and wherever they change; never larger than the tensor."""
    seed %= 1 << 62
    old, other = random_bits(num, dtype, seed), random_bits(num, dtype, seed + 1)
    draw = torch.rand(num, generator=torch.Generator().manual_seed(seed)) < share
    new = torch.where(draw, other.view(BITS[dtype.itemsize]), old.view(BITS[dtype.itemsize]))
    new = new.view(dtype)
    given_, num_changed = encode_changes(old, new)
    bytes_differ = old.view(torch.uint8) != new.view(torch.uint8)
    assert num_changed == int(bytes_differ.view(num, -1).any(1).sum())
    if given_.dtype != CHANGES:
        assert given_ is new
        return
    assert given_.nbytes < new.nbytes
    made = old.clone()
    apply_changes(made, given_)
    assert same_bits(made, new)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_numbers_that_are_equal_and_bits_that_are_not(dtype: torch.dtype) -> None:
    """-0.0 in place of 0.0 is a change, and NaN in place of the same NaN is none."""
    old = torch.tensor(SPECIAL * 100, dtype=dtype)
    new = old.clone()
    new[0], new[7], new[8] = -0.0, 0.0, float("nan")
    given_, num_changed = encode_changes(old, new)
    assert num_changed == 2 and given_.nbytes == 4 + 2 * (dtype.itemsize + 2)
    apply_changes(old, given_)
    assert same_bits(old, new)


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 1 / 2), (torch.float32, 2 / 3)])
def test_many_changes_are_a_whole_tensor(dtype: torch.dtype, most: float) -> None:
    """From the share on at which positions and values are as many bytes."""
    old = torch.zeros(60_000, dtype=dtype)
    for share, is_whole in ((most - 0.001, False), (most, True)):
        new = old.clone()
        new[: round(share * len(old))] = 1
        assert (encode_changes(old, new)[0] is new) == is_whole


def test_both_ends_keep_the_same() -> None:
    """After any sequence of versions; nothing is sent of what stays, and what is kept is no memory
    of the model's, which training changes in place."""
    here, there = KeptWeights(), KeptWeights()
    model = {"a": torch.randn(500, 30).T, "b": torch.tensor(2.0), "c": torch.zeros(9)}
    for step in range(5):
        for name, tensor in model.items():
            sent, num_changed = here.replace(name, tensor)
            assert (sent is None) == (step > 0 and num_changed == 0)
            assert num_changed == (tensor.numel() if not step else {"a": 2, "b": 1, "c": 0}[name])
            if sent is not None:
                there.apply(name, sent.clone())
        for name, tensor in model.items():
            assert same_bits(there.tensors[name], tensor.contiguous())
        model["a"][step, 2:4] += 1.0
        model["b"] += 1.0
