"""Weights that the first rank broadcasts to engines on other devices: all of them, or an error."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch

from tests.verl.training.test_weight_stream import CPU, Named, broken, noting, tensors
from verl.training import weight_stream
from verl.training.weight_broadcast import WeightBroadcast, WeightReceiver

HOST = "127.0.0.1"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers that a few tensors fill, and little patience."""
    monkeypatch.setattr(weight_stream, "BUFFER_BYTES", 4096)
    monkeypatch.setattr(weight_stream, "CONNECT_TIMEOUT_S", 3.0)


Taking = Callable[[], list[Future[Named]]]


def taking(pool: ThreadPoolExecutor, workers: Sequence[WeightReceiver]) -> list[Future[Named]]:
    """What each of the workers finds of the next weights, copied before others come."""
    copied = lambda one: [(name, tensor.clone()) for name, tensor in one.receive()]  # noqa: E731
    return [pool.submit(copied, one) for one in workers]


@pytest.fixture
def receivers() -> Iterator[tuple[WeightBroadcast, Taking]]:
    """A rank, and two workers that each take the next weights when they are told to."""
    rank = WeightBroadcast(HOST, 2, CPU)
    workers = [WeightReceiver(rank.stream, CPU) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        yield rank, lambda: taking(pool, workers)


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
        assert rank.send(tensors(seed), dtype).seconds > 0
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
        waiting = pool.submit(lambda: list(late.receive()))
        rank.send(noting(tensors(), seen), torch.float32)
        with pytest.raises(ConnectionError, match="the training rank did not send its weights"):
            waiting.result()
    assert len(seen) == len(tensors())
    assert "the engines did not receive the new weights" in caplog.text


def test_a_rank_that_ends_is_no_end_of_the_weights(
    receivers: tuple[WeightBroadcast, Taking],
) -> None:
    """Half of the weights are an error, not a model."""
    rank, take = receivers
    waiting = take()
    with pytest.raises(RuntimeError, match="died"):
        rank.send(broken(tensors()[:4]), torch.float32)
    for one in waiting:
        with pytest.raises(ConnectionError, match="the training rank did not send its weights"):
            one.result()


STEPS = (0.0, 1e-3, 0.0, 1e-3, 1.0)
"""Of each hand-over, the share of elements that are others than before, in the larger tensors."""


def trained(named: Named, share: float, seed: int) -> Named:
    """As many elements, at least, with other bits: an update of weights in bfloat16."""
    draw = torch.Generator().manual_seed(seed)
    return [(name, tensor + (torch.rand(tensor.shape, generator=draw) < share))
            for name, tensor in named]  # fmt: skip


def test_changes_give_the_weights_that_whole_tensors_give() -> None:
    """Every worker has all tensors after each hand-over, bit for bit, for a part of the bytes."""
    rank = WeightBroadcast(HOST, 2, CPU, sends_changes=True)
    workers = [WeightReceiver(rank.stream, CPU) for _ in range(2)]
    named, sizes = tensors(), []
    whole = sum(2 * tensor.numel() for _, tensor in named)
    with ThreadPoolExecutor(2) as pool:
        for seed, share in enumerate(STEPS):
            named = trained(named, share, seed)
            waiting = taking(pool, workers)
            sent = rank.send(named, torch.bfloat16)
            sizes.append(sent.num_bytes)
            assert sent.num_elements == whole // 2
            for one in waiting:
                for (name, copy), (expected, tensor) in zip(one.result(), named, strict=True):
                    assert name == expected and copy.dtype == torch.bfloat16
                    assert torch.equal(copy, tensor.bfloat16())
    assert sizes[0] >= whole and sizes[2] == 0 and sizes[4] >= whole
    assert 0 < sizes[1] < 0.05 * whole and 0 < sizes[3] < 0.05 * whole


@pytest.mark.parametrize("is_told", [True, False])
def test_a_worker_that_lacks_the_weights_before_gets_all_or_refuses(is_told: bool) -> None:
    """One that lost a hand-over half way says so, and all are sent everything; had it been silent,
    it would not take changes of what it has not."""
    rank = WeightBroadcast(HOST, 2, CPU, sends_changes=True)
    workers = [WeightReceiver(rank.stream, CPU) for _ in range(2)]
    first, second = tensors(0), tensors(1)
    with ThreadPoolExecutor(2) as pool:
        waiting = taking(pool, workers)
        rank.send(first, torch.float32)
        assert all(len(one.result()) == len(first) for one in waiting)
        workers[0]._base = 0
        if not is_told:
            rank._store.add("2/has/1", 1)
        waiting = taking(pool, workers)
        sent = rank.send(second, torch.float32)
        assert sent.num_changed == sent.num_elements
        if not is_told:
            with pytest.raises(
                ConnectionError,
                match="changes refer to weight transfer 1, but",
            ):
                waiting[0].result()
            return
        for one in waiting:
            for (_, copy), (_, tensor) in zip(one.result(), second, strict=True):
                assert torch.equal(copy, tensor)


def test_after_a_broken_hand_over_nothing_stands_on_it() -> None:
    """A rank that could not send keeps no base: what it kept by then is of two versions."""
    rank = WeightBroadcast(HOST, 1, CPU, sends_changes=True)
    worker = WeightReceiver(rank.stream, CPU)
    with ThreadPoolExecutor(1) as pool:
        waiting = taking(pool, [worker])
        rank.send(tensors(0), torch.float32)
        waiting[0].result()
        waiting = taking(pool, [worker])
        with pytest.raises(RuntimeError, match="died"):
            rank.send(broken(tensors(1)[:4]), torch.float32)
        with pytest.raises(ConnectionError):
            waiting[0].result()
    assert rank._base == worker._base == 0


def test_a_long_search_for_changes_is_no_end_of_the_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a large model few changes fill no buffer for longer than a worker waits for the next."""
    rank = WeightBroadcast(HOST, 1, CPU, sends_changes=True)
    worker, named = WeightReceiver(rank.stream, CPU), tensors()
    with ThreadPoolExecutor(1) as pool:
        for pause in (0.0, 2.0 / len(named)):
            waiting = taking(pool, [worker])
            rank.send(slowly(named, pause), torch.float32)
            assert [name for name, _ in waiting[0].result()] == [name for name, _ in named]
            monkeypatch.setattr(weight_stream, "CONNECT_TIMEOUT_S", 1.0)
            worker._store.set_timeout(timedelta(seconds=1.0))


def slowly(named: Named, pause: float) -> Iterator[tuple[str, torch.Tensor]]:
    """Each after so many seconds."""
    for one in named:
        time.sleep(pause)
        yield one
