"""Flash attention of packed rows, by fakes of its kernels, compared with attention run by run."""

import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from verl.ext.flash_attention import (
    attend_with_flash,
    attend_with_torch_varlen,
    cuda_kernel,
    has_option,
)
from verl.training.attention import SequenceBounds, attend_per_run

LENGTHS = [7, 1, 12, 4]
rows = pytest.mark.parametrize(
    "bounds",
    [
        SequenceBounds.of([(0, n) for n in LENGTHS], torch.device("cpu")),
        SequenceBounds.of([(0, 5), (5, 7), (5, 12), (5, 6), (0, 4)], torch.device("cpu")),
    ],
    ids=["whole sequences", "a shared prompt"],
)


def attend_by_definition(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, scale: float,
    left: int,
) -> Tensor:  # fmt: skip
    """Compute causal attention by its definition, for as many key heads as query heads.

    The last query of a sequence sees its last key.
    """
    assert query.shape[1] == key.shape[1] == value.shape[1], "the kernel does not support GQA"
    attended = torch.zeros_like(query)
    bounds = zip(*(itertools.pairwise(cu.tolist()) for cu in (cu_seq_q, cu_seq_k)), strict=True)
    for (start, end), (first, last) in bounds:
        for t, head in itertools.product(range(start, end), range(query.shape[1])):
            own = last - end + t
            seen = slice(first if left < 0 else max(first, own - left), own + 1)
            weights = torch.softmax(scale * key[seen, head] @ query[t, head], 0)
            attended[t, head] = weights @ value[seen, head]
    return attended


def varlen_of_2_10(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int,
    max_k: int, is_causal: bool = False, return_aux: object = None,
) -> Tensor:  # fmt: skip
    """Fake torch's kernel, with its signature in torch 2.10: causal from the last key backwards."""
    assert is_causal and key.shape[1] == query.shape[1]
    assert (max_q, max_k) == (cu_seq_q.diff().max(), cu_seq_k.diff().max())
    VARLEN_CALLS.append(max_k)
    scale = query.shape[-1] ** -0.5
    return attend_by_definition(query, key, value, cu_seq_q, cu_seq_k, scale, -1)


VARLEN_CALLS: list[int] = []
"""Longest keys of each call of `varlen_of_2_10`."""


def varlen_of_2_11(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int,
    max_k: int, *, return_aux: object = None, scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:  # fmt: skip
    """Fake torch's kernel, with its signature in torch 2.11."""
    assert window_size[1] == 0 and scale is not None
    assert (max_q, max_k) == (cu_seq_q.diff().max(), cu_seq_k.diff().max())
    return attend_by_definition(query, key, value, cu_seq_q, cu_seq_k, scale, window_size[0])


def varlen_of_2_12(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int,
    max_k: int, *, return_aux: object = None, scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Fake torch's kernel, with its signature since torch 2.12: with `enable_gqa`."""
    if enable_gqa:
        key, value = (x.repeat_interleave(2, dim=1) for x in (key, value))
    return varlen_of_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale,
                          window_size=window_size)  # fmt: skip


@rows
@pytest.mark.parametrize("kernel", [varlen_of_2_11, varlen_of_2_12])
@pytest.mark.parametrize(("key_heads", "window"), [(2, 0), (2, 3), (2, 4), (4, 0)])
def test_torch_kernels_with_and_without_gqa_give_the_same(
    kernel: Callable[..., Tensor], key_heads: int, window: int, bounds: SequenceBounds
) -> None:
    """Grouped-query models also run if the kernel needs as many key heads as query heads."""
    torch.manual_seed(0)
    query = torch.randn(sum(bounds.lengths), 4, 8)
    key, value = (torch.randn(sum(bounds.num_keys), key_heads, 8) for _ in range(2))
    expected = attend_per_run(query, key, value, bounds, 0.3, window)
    attended = attend_with_torch_varlen(query, key, value, bounds, 0.3, window, kernel)
    torch.testing.assert_close(attended, expected, rtol=1e-4, atol=1e-5)


@rows
@pytest.mark.parametrize("key_heads", [2, 4])
@pytest.mark.parametrize(
    ("scale", "window", "uses_kernel"),
    [(8**-0.5, 0, True), (8**-0.5, 1000, True), (8**-0.5, 3, False), (0.3, 0, False)],
)
def test_the_kernel_of_torch_2_10_gives_the_same(
    scale: float, window: int, uses_kernel: bool, key_heads: int, bounds: SequenceBounds
) -> None:
    """It is used where it can be: for the usual scale, and where a window hides nothing."""
    torch.manual_seed(0)
    VARLEN_CALLS.clear()
    query = torch.randn(sum(bounds.lengths), 4, 8)
    key, value = (torch.randn(sum(bounds.num_keys), key_heads, 8) for _ in range(2))
    expected = attend_per_run(query, key, value, bounds, scale, window)
    attended = attend_with_torch_varlen(query, key, value, bounds, scale, window, varlen_of_2_10)
    torch.testing.assert_close(attended, expected, rtol=1e-4, atol=1e-5)
    assert bool(VARLEN_CALLS) is uses_kernel


def flash(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int,
    max_k: int, *, softmax_scale: float, causal: bool, window_size: tuple[int, int],
    deterministic: bool,
) -> Tensor:  # fmt: skip
    """Fake flash-attn's kernel: a window of -1 is unlimited, to the right too, with `causal`."""
    assert causal and (window_size == (-1, -1) or window_size[1] == 0)
    key, value = (x.repeat_interleave(2, dim=1) for x in (key, value))
    return varlen_of_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k,
                          scale=softmax_scale, window_size=(window_size[0], 0))  # fmt: skip


@rows
@pytest.mark.parametrize("window", [0, 3, 4])
def test_flash_attention_gives_the_same(window: int, bounds: SequenceBounds) -> None:
    """With a window and without."""
    torch.manual_seed(0)
    query = torch.randn(sum(bounds.lengths), 4, 8)
    key = torch.randn(sum(bounds.num_keys), 2, 8)
    expected = attend_per_run(query, key, key, bounds, 0.3, window)
    attended = attend_with_flash(query, key, key, bounds, 0.3, window, flash)
    torch.testing.assert_close(attended, expected, rtol=1e-4, atol=1e-5)


class Recorder:
    """A kernel that records its arguments by name; the call must fit the signature of `like`."""

    def __init__(self, like: Callable[..., Any] | None = None) -> None:
        self.__signature__ = inspect.signature(like or (lambda *rows, **options: None))

    def __call__(self, *rows: Any, **options: Any) -> Tensor:
        self.arguments = self.__signature__.bind(*rows, **options).arguments
        query: Tensor = rows[0]
        return query


def call_with(
    attend: Callable[..., Tensor], kernel: Recorder, scale: float = 0.5
) -> dict[str, Any]:
    """Return the arguments that `kernel` gets for a row of a grouped-query model."""
    query, key = torch.randn(5, 4, 8), torch.randn(5, 2, 8)
    attend(query, key, key, SequenceBounds.of([(0, 2), (0, 3)], query.device), scale, 0, kernel)
    return kernel.arguments


def test_the_call_fits_the_installed_torch() -> None:
    """All arguments exist in the kernel of the installed torch, whatever its version."""
    passed = call_with(attend_with_torch_varlen, Recorder(varlen_attn), scale=8**-0.5)
    assert passed["max_q"] == 3
    if has_option(varlen_attn, "window_size"):
        assert (passed["window_size"], passed["scale"]) == ((-1, 0), 8**-0.5)
    else:
        assert passed["is_causal"]


@pytest.fixture
def determinism() -> Iterator[None]:
    """Restore torch's setting."""
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("determinism")
def test_flash_attention_is_deterministic_when_torch_is() -> None:
    """flash-attn has its own option, which torch's setting does not affect."""
    for enabled in (False, True):
        torch.use_deterministic_algorithms(enabled)
        assert call_with(attend_with_flash, Recorder())["options"]["deterministic"] is enabled


@pytest.mark.parametrize(
    ("capability", "is_flash"), [((7, 0), False), ((7, 5), False), ((8, 0), True), ((12, 0), True)]
)
def test_flash_attention_is_for_ampere_and_newer(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], is_flash: bool
) -> None:
    """On a V100 or T4, which compute in float16, its kernels would raise."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert (cuda_kernel.__wrapped__() is not attend_per_run) is is_flash


def chosen_kernel() -> object:
    """Return the function that `cuda_kernel` chooses now, without its cache."""
    kernel = cuda_kernel.__wrapped__()
    return getattr(kernel, "func", kernel)


@pytest.mark.parametrize("name", ["flash_attn/notes.txt", "flash_attn/__init__.py"])
def test_a_folder_named_flash_attn_is_no_kernel(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout or data folder on the path imports as a package, but lacks the function."""
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert chosen_kernel() is not attend_with_flash
    sys.modules.pop("flash_attn", None)


@pytest.mark.parametrize(
    ("has_flash", "has_varlen", "expected"),
    [
        (True, True, attend_with_flash),
        (False, True, attend_with_torch_varlen),
        (False, False, attend_per_run),
    ],
)
def test_the_fastest_installed_kernel_is_chosen(
    has_flash: bool, has_varlen: bool, expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """flash-attn, else torch's variable-length kernel, else attention per run."""
    package = SimpleNamespace(flash_attn_varlen_func=flash) if has_flash else None
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    if not has_varlen:
        monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
        monkeypatch.delattr(torch.nn.attention, "varlen")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert chosen_kernel() is expected
