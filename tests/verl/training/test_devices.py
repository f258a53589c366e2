"""Dtype, determinism and peak memory of a process."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from verl import cpu
from verl.config import Config
from verl.ext.lora.choice import engine_takes_adapter
from verl.ports import free_port
from verl.training.devices import (
    PeakMemory,
    join_process_group,
    make_deterministic,
    resolve_dtype,
    take_peak_memory,
)


@pytest.fixture(autouse=True)
def restore_determinism() -> Iterator[None]:
    """Restore torch's determinism setting."""
    was_enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    yield
    torch.use_deterministic_algorithms(was_enabled, warn_only=warn_only)


def test_torch_is_made_deterministic() -> None:
    """Nondeterministic operations are errors: with warnings, attention would stay as it is."""
    torch.use_deterministic_algorithms(False)
    make_deterministic()
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()


@pytest.mark.parametrize(
    ("device", "has_units", "expected"),
    [("cuda", True, torch.bfloat16), ("cuda", False, torch.float32), ("cpu", False, torch.float32)],
)
def test_gpus_that_only_emulate_bfloat16_compute_in_float32(
    monkeypatch: pytest.MonkeyPatch, device: str, has_units: bool, expected: torch.dtype
) -> None:
    """A V100 or T4 reports support of bfloat16, but it is slower there than float32."""

    def supported(including_emulation: bool = True) -> bool:
        return has_units or including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    monkeypatch.setattr(cpu, "has_bfloat16", lambda: False)
    assert resolve_dtype("auto", torch.device(device)) is expected


@pytest.mark.parametrize(
    ("rank", "device", "merges", "expected"),
    [
        (0, "cpu", None, False), (0, "cuda", False, False),
        (4, "cpu", None, False), (4, "cuda", None, True),
        (4, "cpu", False, True), (4, "cuda", True, False),
    ],
)  # fmt: skip
def test_an_engine_takes_the_adapter_where_that_is_faster(
    rank: int, device: str, merges: bool | None, expected: bool
) -> None:
    """By default on GPUs, on a CPU only by option, and never without an adapter."""
    config = Config()
    config.actor_rollout_ref.model.lora_rank = rank
    config.actor_rollout_ref.rollout.merge_adapter = merges
    config.trainer.device = device
    assert engine_takes_adapter(config) is expected


class FakeCuda:
    """The memory functions of torch.cuda, for one device."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def hold(self, num_bytes: int) -> None:
        self.now, self.peak = num_bytes, max(self.peak, num_bytes)

    def max_memory_allocated(self, device: torch.device) -> int:
        return self.peak

    def max_memory_reserved(self, device: torch.device) -> int:
        return self.peak + 2

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak = self.now


def test_a_peak_is_that_since_the_last_call() -> None:
    """Memory still in use counts in the next peak, released memory does not."""
    device, memory = torch.device("cuda"), FakeCuda()
    for held in (5, 9, 4):
        memory.hold(held)
    assert take_peak_memory(device, memory) == PeakMemory(9, 11)
    assert take_peak_memory(device, memory) == PeakMemory(4, 6)
    assert take_peak_memory(torch.device("cpu"), memory) is None


@pytest.mark.parametrize(("timeout_s", "expected"), [(0.0, 1800), (600.0, 1800), (7200.0, 7200)])
def test_ranks_wait_for_a_slow_node_as_long_as_the_user_says(
    timeout_s: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And never shorter than torch lets them; a rank may still download or read its model."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    device = torch.device("cpu")
    join_process_group(device, 0, 1, timeout_s)
    try:
        backend = dist.distributed_c10d._get_default_group()._get_backend(device)
        assert backend.options._timeout.total_seconds() == expected
    finally:
        dist.destroy_process_group()
