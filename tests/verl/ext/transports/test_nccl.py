"""Weight transfer by broadcast to engines on other devices: complete, or an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from tests.verl.ext.transports.silent_group import SilentGroups
from tests.verl.ext.transports.test_ipc import CPU, Named, broken, recording, tensors
from verl.ext.transports import stream as streams
from verl.ext.transports.nccl import WeightBroadcast, WeightReceiver

HOST = "127.0.0.1"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small buffers, which a few tensors fill, and a short timeout."""
    monkeypatch.setattr(streams, "BUFFER_BYTES", 4096)
    monkeypatch.setattr(streams, "CONNECT_TIMEOUT_S", 3.0)


@pytest.fixture
def soon_lost(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ends that wait for a lost one give up early."""
    monkeypatch.setattr(streams, "CONNECT_TIMEOUT_S", 1.5)


StartReceiving = Callable[[], list[Future[Named]]]


def start_receiving(
    pool: ThreadPoolExecutor, workers: Sequence[WeightReceiver]
) -> list[Future[Named]]:
    """Let each worker receive the next weights; returns futures of copies of the tensors."""

    def receive(worker: WeightReceiver) -> Named:
        return [(name, tensor.clone()) for name, tensor in worker.receive()]

    return [pool.submit(receive, worker) for worker in workers]


@pytest.fixture
def receivers() -> Iterator[tuple[WeightBroadcast, StartReceiving]]:
    """A rank, and a function that lets two workers receive the next weights."""
    rank = WeightBroadcast(HOST, 2, CPU)
    workers = [WeightReceiver(rank.address, CPU) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        yield rank, lambda: start_receiving(pool, workers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_worker_has_every_tensor(
    receivers: tuple[WeightBroadcast, StartReceiving], dtype: torch.dtype
) -> None:
    """In order, in the engine's dtype, and copied; repeatedly through the same group."""
    rank, start = receivers
    received = []
    for seed in range(3):
        futures = start()
        assert rank.send(tensors(seed), dtype).seconds > 0
        received += [(tensors(seed), future.result()) for future in futures]
    for named, copies in received:
        assert [name for name, _ in copies] == [name for name, _ in named]
        for (_, copy), (_, tensor) in zip(copies, named, strict=True):
            assert copy.dtype == dtype and torch.equal(copy, tensor.to(dtype))


def test_the_store_keeps_the_announcements_of_one_transfer(
    receivers: tuple[WeightBroadcast, StartReceiving],
) -> None:
    """They name every tensor, and would fill the rank's memory in a long run."""
    rank, start = receivers
    sizes = []
    for seed in range(3):
        futures = start()
        rank.send(tensors(seed), torch.float32)
        for future in futures:
            future.result()
        sizes.append(rank._store.num_keys())
    assert sizes[2] - sizes[1] == len(["here", "begin"])


@pytest.mark.usefixtures("soon_lost")
def test_if_a_worker_is_missing_no_worker_gets_the_weights(
    receivers: tuple[WeightBroadcast, StartReceiving], caplog: pytest.LogCaptureFixture
) -> None:
    """The others get an error; the rank iterates over all tensors, which ranks gather together."""
    rank, _ = receivers
    seen: list[str] = []
    late = WeightReceiver(rank.address, CPU)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(lambda: list(late.receive()))
        rank.send(recording(tensors(), seen), torch.float32)
        with pytest.raises(ConnectionError):
            future.result()
    assert len(seen) == len(tensors())
    assert "the engines did not receive the new weights" in caplog.text


@pytest.mark.usefixtures("soon_lost")
def test_a_lost_rank_is_an_error(
    receivers: tuple[WeightBroadcast, StartReceiving],
) -> None:
    """An incomplete transfer is an error, not a model."""
    rank, start = receivers
    futures = start()
    with pytest.raises(RuntimeError, match="died"):
        rank.send(broken(tensors()[:4]), torch.float32)
    for future in futures:
        with pytest.raises(ConnectionError):
            future.result()


def test_a_group_with_the_semantics_of_nccl_transfers_everything() -> None:
    """Its `wait` says nothing: both ends look until a broadcast is complete."""
    groups = SilentGroups()
    rank = WeightBroadcast(HOST, 1, CPU, factory=groups)
    worker = WeightReceiver(rank.address, CPU, groups)
    with ThreadPoolExecutor(1) as pool:
        for seed in range(2):
            (future,) = start_receiving(pool, [worker])
            rank.send(tensors(seed), torch.float32)
            for (_, copy), (_, tensor) in zip(future.result(), tensors(seed), strict=True):
                assert torch.equal(copy, tensor)
    assert [group.num_aborts for group in groups.made] == [0, 0]


@pytest.mark.usefixtures("soon_lost")
@pytest.mark.parametrize("lost_at", [0, 1])
def test_a_worker_that_is_lost_in_silence_is_noticed(
    lost_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    """With NCCL no call fails: the transfer is not a success, and the rank leaves the group.

    The rank itself lives on, so that new engines can get the weights.
    """
    groups, seen = SilentGroups(lost_at), list[str]()
    rank = WeightBroadcast(HOST, 1, CPU, factory=groups)
    worker = WeightReceiver(rank.address, CPU)
    with ThreadPoolExecutor(1) as pool:
        (future,) = start_receiving(pool, [worker])
        rank.send(recording(tensors(), seen), torch.float32)
        with pytest.raises(ConnectionError):
            future.result()
    assert len(seen) == len(tensors())
    assert "the engines did not receive the new weights: a broadcast did not end" in caplog.text
    assert groups.made[0].num_aborts == 1
    again = WeightBroadcast(HOST, 1, CPU)  # as after a restart of the engines
    worker = WeightReceiver(again.address, CPU)
    with ThreadPoolExecutor(1) as pool:
        (future,) = start_receiving(pool, [worker])
        again.send(tensors(1), torch.float32)
        assert len(future.result()) == len(tensors(1))


@pytest.mark.usefixtures("soon_lost")
def test_a_rank_that_is_lost_in_silence_is_noticed() -> None:
    """A worker does not take a buffer that was never filled for weights."""
    groups = SilentGroups(lost_at=1)
    rank = WeightBroadcast(HOST, 1, CPU)
    worker = WeightReceiver(rank.address, CPU, groups)
    with ThreadPoolExecutor(1) as pool:
        (future,) = start_receiving(pool, [worker])
        rank.send(tensors(), torch.float32)
        with pytest.raises(ConnectionError):
            future.result()
    assert groups.made[0].num_aborts == 1
