"""Weight transfer from a rank to engines on its device: complete, whichever process is lost."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from verl.ext.transports import ipc
from verl.ext.transports import stream as streams
from verl.ext.transports.ipc import receive, send
from verl.ext.transports.stream import TransferStats

CPU = torch.device("cpu")
Named = list[tuple[str, Tensor]]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use buffers so small that a few tensors fill them."""
    monkeypatch.setattr(streams, "BUFFER_BYTES", 4096)


def tensors(seed: int = 0) -> Named:
    """Make tensors of many sizes: small ones, one larger than a buffer, a transposed, a scalar."""
    draw = torch.Generator().manual_seed(seed)
    shapes = [(3,), (40, 7), (1,), (100, 100), (17, 5), (8, 128), (2, 3, 4), (), (64, 64)] * 3
    named = [(f"{i}", torch.randn(shape, generator=draw)) for i, shape in enumerate(shapes)]
    return [*named, ("transposed", torch.randn(30, 9, generator=draw).T)]


def exchange(named: Named, num_receivers: int, dtype: torch.dtype) -> list[Named]:
    """Send tensors to `num_receivers` receivers; return what each of them received."""
    stream = secrets.token_hex(4)
    with ThreadPoolExecutor(num_receivers) as pool:
        futures: list[Future[Named]] = [
            pool.submit(lambda: list(receive(stream, CPU))) for _ in range(num_receivers)
        ]
        send(named, stream, CPU, num_receivers, dtype)
        return [future.result() for future in futures]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_receivers", [1, 3])
def test_every_receiver_has_every_tensor(dtype: torch.dtype, num_receivers: int) -> None:
    """In order, in the engine's dtype, and copied: the buffers are filled again."""
    named = tensors()
    received = exchange(named, num_receivers, dtype)
    assert len(received) == num_receivers
    for copies in received:
        assert [name for name, _ in copies] == [name for name, _ in named]
        for (_, copy), (_, tensor) in zip(copies, named, strict=True):
            assert copy.dtype == dtype and torch.equal(copy, tensor.to(dtype))


def recording(named: Named, seen: list[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield from `named`, recording the names in `seen`."""
    for name, tensor in named:
        seen.append(name)
        yield name, tensor


def test_a_rank_without_an_engine_takes_part_in_gathering() -> None:
    """It iterates over all tensors, though it sends none."""
    seen: list[str] = []
    assert send(recording(tensors(), seen), "nobody", CPU, 0, torch.float32) == TransferStats()
    assert len(seen) == len(tensors())


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("lost_after", [0, 1, 12])
def test_a_lost_receiver_does_not_stop_the_others(lost_after: int) -> None:
    """They receive all tensors, and the rank iterates over all, which ranks gather together."""
    stream, named, seen = secrets.token_hex(4), tensors(), list[str]()

    def lost() -> None:
        receiving = receive(stream, CPU)
        for _ in range(lost_after + 1):
            next(receiving)
        receiving.close()

    with ThreadPoolExecutor(2) as pool:
        whole, cut = pool.submit(lambda: list(receive(stream, CPU))), pool.submit(lost)
        send(recording(named, seen), stream, CPU, 2, torch.float32)
        assert len(whole.result()) == len(seen) == len(named)
        cut.result()


def test_a_missing_receiver_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a timeout, the rank sends to the receivers that have connected."""
    monkeypatch.setattr(streams, "CONNECT_TIMEOUT_S", 0.2)
    stream, received = secrets.token_hex(4), Named()
    thread = threading.Thread(target=lambda: received.extend(receive(stream, CPU)))
    thread.start()
    send(tensors(), stream, CPU, 2, torch.float32)
    thread.join()
    assert len(received) == len(tensors())


@pytest.mark.usefixtures("small")
def test_a_hanging_receiver_is_dropped_after_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others receive all tensors; the hanging one gets an error when it continues."""
    monkeypatch.setattr(ipc, "ACK_TIMEOUT_S", 2.0)
    stream, named, resume = secrets.token_hex(4), tensors(), threading.Event()

    def hang() -> Named:
        receiving = receive(stream, CPU)
        first = [next(receiving)]
        resume.wait(60)
        return [*first, *receiving]

    with ThreadPoolExecutor(2) as pool:
        whole, hung = pool.submit(lambda: list(receive(stream, CPU))), pool.submit(hang)
        try:
            send(named, stream, CPU, 2, torch.float32)
            assert len(whole.result()) == len(named)
        finally:
            resume.set()
        with pytest.raises(ConnectionError):
            hung.result()


def broken(named: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield from `named`, then raise as a rank does that dies."""
    yield from named
    raise RuntimeError("died")


@pytest.mark.usefixtures("small")
def test_a_lost_rank_is_an_error() -> None:
    """An incomplete transfer is an error, not a model."""
    stream = secrets.token_hex(4)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(lambda: list(receive(stream, CPU)))
        with pytest.raises(RuntimeError, match="died"):
            send(broken(tensors()[:4]), stream, CPU, 1, torch.float32)
        with pytest.raises(ConnectionError):
            future.result()


def test_without_a_rank_receiving_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is raised after a timeout."""
    monkeypatch.setattr(streams, "CONNECT_TIMEOUT_S", 0.05)
    with pytest.raises(ConnectionError):
        list(receive("nobody", CPU))


def test_another_users_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages from the socket are unpickled, so its peer must be of the same user."""
    monkeypatch.setattr("os.getuid", lambda: -1)
    monkeypatch.setattr(streams, "CONNECT_TIMEOUT_S", 0.5)
    stream = secrets.token_hex(4)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send, tensors(), stream, CPU, 1, torch.float32)
        with pytest.raises(ConnectionError):
            list(receive(stream, CPU))
        assert sent.result() == TransferStats()
