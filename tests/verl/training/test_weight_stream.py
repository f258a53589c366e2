"""Weights that pass from a rank to engines on its device: all of them, once, whatever ends when."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from verl.training import weight_stream
from verl.training.weight_stream import TransferStats, receive, send

CPU = torch.device("cpu")
Named = list[tuple[str, Tensor]]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers that a few tensors fill."""
    monkeypatch.setattr(weight_stream, "BUFFER_BYTES", 4096)


def tensors(seed: int = 0) -> Named:
    """Of many sizes: several in a buffer, one larger than it, a transposed one, a number."""
    draw = torch.Generator().manual_seed(seed)
    shapes = [(3,), (40, 7), (1,), (100, 100), (17, 5), (8, 128), (2, 3, 4), (), (64, 64)] * 3
    found = [(f"{i}", torch.randn(shape, generator=draw)) for i, shape in enumerate(shapes)]
    return [*found, ("transposed", torch.randn(30, 9, generator=draw).T)]


def exchange(named: Named, num_receivers: int, dtype: torch.dtype) -> list[Named]:
    """What each receiver has after one sending."""
    stream = secrets.token_hex(4)
    with ThreadPoolExecutor(num_receivers) as pool:
        waiting: list[Future[Named]] = [
            pool.submit(lambda: list(receive(stream, CPU))) for _ in range(num_receivers)
        ]
        send(named, stream, CPU, num_receivers, dtype)
        return [one.result() for one in waiting]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_receivers", [1, 3])
def test_every_receiver_has_every_tensor(dtype: torch.dtype, num_receivers: int) -> None:
    """In the order in which they came, as the engine's dtype, and in memory of its own: what is
    sent afterwards into the same buffers changes nothing of it."""
    named = tensors()
    found = exchange(named, num_receivers, dtype)
    assert len(found) == num_receivers
    for copies in found:
        assert [name for name, _ in copies] == [name for name, _ in named]
        for (_, copy), (_, tensor) in zip(copies, named, strict=True):
            assert copy.dtype == dtype and torch.equal(copy, tensor.to(dtype))


def noting(named: Named, seen: list[str]) -> Iterator[tuple[str, Tensor]]:
    """`named`, with a note of what was taken from it."""
    for name, tensor in named:
        seen.append(name)
        yield name, tensor


def test_a_rank_without_an_engine_takes_part_in_gathering() -> None:
    """All tensors are taken, though none is sent."""
    seen: list[str] = []
    assert send(noting(tensors(), seen), "nobody", CPU, 0, torch.float32) == TransferStats()
    assert len(seen) == len(tensors())


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("lost_after", [0, 1, 12])
def test_a_receiver_that_is_lost_stops_nobody(lost_after: int) -> None:
    """The others have all, and the rank takes all tensors, which others gather with it."""
    stream, named, seen = secrets.token_hex(4), tensors(), list[str]()

    def lost() -> None:
        coming = receive(stream, CPU)
        for _ in range(lost_after + 1):
            next(coming)
        coming.close()

    with ThreadPoolExecutor(2) as pool:
        whole, cut = pool.submit(lambda: list(receive(stream, CPU))), pool.submit(lost)
        send(noting(named, seen), stream, CPU, 2, torch.float32)
        assert len(whole.result()) == len(seen) == len(named)
        cut.result()


def test_one_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a while the rank sends to those that are there."""
    monkeypatch.setattr(weight_stream, "CONNECT_TIMEOUT_S", 0.2)
    stream, found = secrets.token_hex(4), Named()
    thread = threading.Thread(target=lambda: found.extend(receive(stream, CPU)))
    thread.start()
    send(tensors(), stream, CPU, 2, torch.float32)
    thread.join()
    assert len(found) == len(tensors())


@pytest.mark.usefixtures("small")
def test_one_that_hangs_keeps_the_rank_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have all; it learns that it has not when it goes on."""
    monkeypatch.setattr(weight_stream, "ACK_TIMEOUT_S", 5.0)
    stream, named, goes_on = secrets.token_hex(4), tensors(), threading.Event()

    def hang() -> Named:
        coming = receive(stream, CPU)
        first = [next(coming)]
        goes_on.wait(60)
        return [*first, *coming]

    with ThreadPoolExecutor(2) as pool:
        whole, hung = pool.submit(lambda: list(receive(stream, CPU))), pool.submit(hang)
        try:
            send(named, stream, CPU, 2, torch.float32)
            assert len(whole.result()) == len(named)
        finally:
            goes_on.set()
        with pytest.raises(ConnectionError, match="ended while it sent"):
            hung.result()


def broken(named: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Ends as a rank does that dies."""
    yield from named
    raise RuntimeError("died")


@pytest.mark.usefixtures("small")
def test_a_rank_that_ends_is_no_end_of_the_weights() -> None:
    """Half of the weights are an error, not a model."""
    stream = secrets.token_hex(4)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: list(receive(stream, CPU)))
        with pytest.raises(RuntimeError, match="died"):
            send(broken(tensors()[:4]), stream, CPU, 1, torch.float32)
        with pytest.raises(ConnectionError, match="ended while it sent"):
            waiting.result()


def test_nobody_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no rank comes, the engine says so after a while."""
    monkeypatch.setattr(weight_stream, "CONNECT_TIMEOUT_S", 0.05)
    with pytest.raises(ConnectionError, match="no training rank sends weights here"):
        list(receive("nobody", CPU))


def test_another_users_process_is_not_listened_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes through the socket is unpickled, so that its other end must be this user's."""
    monkeypatch.setattr("os.getuid", lambda: -1)
    monkeypatch.setattr(weight_stream, "CONNECT_TIMEOUT_S", 0.5)
    stream = secrets.token_hex(4)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send, tensors(), stream, CPU, 1, torch.float32)
        with pytest.raises(ConnectionError, match="another user's process"):
            list(receive(stream, CPU))
        assert sent.result() == TransferStats()
