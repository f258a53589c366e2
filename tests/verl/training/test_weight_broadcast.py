"""Weights that the first rank broadcasts to engines on other devices: all of them, or an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from tests.verl.training.test_weight_stream import CPU, Named, broken, noting, tensors
from verl.training import weight_packing
from verl.training.weight_broadcast import WeightBroadcast, WeightReceiver

HOST = "127.0.0.1"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers that a few tensors fill, and little patience."""
    monkeypatch.setattr(weight_packing, "BUFFER_BYTES", 4096)
    monkeypatch.setattr(weight_packing, "PATIENCE_S", 3.0)


Taking = Callable[[], list[Future[Named]]]


@pytest.fixture
def receivers() -> Iterator[tuple[WeightBroadcast, Taking]]:
    """A rank, and two workers that each take the next weights when they are told to."""
    rank = WeightBroadcast(HOST, 2, CPU)
    workers = [WeightReceiver(rank.stream, CPU) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        yield rank, lambda: [pool.submit(lambda one=one: list(one.received())) for one in workers]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_worker_has_every_tensor(
    receivers: tuple[WeightBroadcast, Taking], dtype: torch.dtype
) -> None:
    """In the order in which they came, as the engine's dtype, in memory of its own; again and
    again through one group."""
    rank, take = receivers
    found = []
    for seed in range(3):
        waiting = take()
        assert rank.send(tensors(seed), dtype) > 0
        found += [(tensors(seed), one.result()) for one in waiting]
    for named, copies in found:
        assert [name for name, _ in copies] == [name for name, _ in named]
        for (_, copy), (_, tensor) in zip(copies, named, strict=True):
            assert copy.dtype == dtype and torch.equal(copy, tensor.to(dtype))


def test_where_one_does_not_come_nobody_has_the_weights(
    receivers: tuple[WeightBroadcast, Taking], caplog: pytest.LogCaptureFixture
) -> None:
    """The others say so; the rank takes all tensors, which other ranks gather with it."""
    rank, _ = receivers
    seen: list[str] = []
    late = WeightReceiver(rank.stream, CPU)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: list(late.received()))
        rank.send(noting(tensors(), seen), torch.float32)
        with pytest.raises(ConnectionError, match="the training rank sends no weights"):
            waiting.result()
    assert len(seen) == len(tensors())
    assert "engines do not take new weights" in caplog.text


def test_a_rank_that_ends_is_no_end_of_the_weights(
    receivers: tuple[WeightBroadcast, Taking],
) -> None:
    """Half of the weights are an error, not a model."""
    rank, take = receivers
    waiting = take()
    with pytest.raises(RuntimeError, match="died"):
        rank.send(broken(tensors()[:4]), torch.float32)
    for one in waiting:
        with pytest.raises(ConnectionError, match="the training rank sends no weights"):
            one.result()
