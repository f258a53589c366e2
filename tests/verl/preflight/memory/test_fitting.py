"""What cannot fit is found out, and what is proposed instead does fit."""

from __future__ import annotations

import copy

import pytest

from tests.verl.preflight.memory.shapes import shape_of
from tests.verl.preflight.memory.test_presets import machine
from verl.config import Config
from verl.config.checks import check
from verl.machine import HostMemory, Machine
from verl.preflight.memory.estimate import Setting, estimate
from verl.preflight.memory.fitting import CLOSE, REFUSED, changed, proposals, shortages
from verl.preflight.memory.needs import Place
from verl.preflight.memory.table import amount, proposal_line, shortage_line, table

GIB = 1 << 30


def run(gpus: int, estimator: str = "grpo") -> Config:
    """A run without adapters on so many GPUs."""
    config = Config()
    config.actor_rollout_ref.model.path = "m"
    config.data.train_files = config.data.val_files = "rows.parquet"
    config.algorithm.adv_estimator = estimator
    config.actor_rollout_ref.rollout.n_agent = 5 if estimator == "grpo" else 1
    config.trainer.n_gpus_per_node = gpus
    return config


def setting(size: str, here: Machine) -> Setting:
    shape = shape_of(size)
    return Setting(shape, shape, True, here.devices[0].total)


CASES = [
    ("Qwen2.5-7B", 8, 24.0, 512, "grpo"),
    ("Qwen2.5-3B", 1, 79.0, 256, "gae"),
    ("Qwen2.5-7B", 2, 79.0, 256, "gae"),
    ("Qwen2.5-14B", 8, 79.0, 2000, "gae"),
]


@pytest.mark.parametrize(("size", "gpus", "gpu_gib", "host_gb", "estimator"), CASES)
def test_proposals_fit(size: str, gpus: int, gpu_gib: float, host_gb: int, estimator: str) -> None:
    """A run that is too large gets settings that are valid, differ, and fit with room to spare."""
    here, config = machine(gpus, gpu_gib, host_gb), run(gpus, estimator)
    what = setting(size, here)
    before = copy.deepcopy(config)
    assert shortages(config, estimate(config, what), here, REFUSED)
    found = list(proposals(config, what, here))
    assert found and config == before
    for change, expected in found:
        other = changed(config, change)
        assert other != config
        check(other)
        assert estimate(other, what) == expected
        assert not shortages(other, expected, here, CLOSE)


def test_nothing_is_proposed_where_nothing_fits() -> None:
    """A model far beyond the machine."""
    here, config = machine(1, 23.5, 64), run(1)
    assert list(proposals(config, setting("Qwen2.5-32B", here), here)) == []


def test_idle_devices_are_proposed() -> None:
    """A run on one of eight GPUs hears of the others."""
    here, config = machine(8, 79, 1024), run(1)
    changes = [change for change, _ in proposals(config, setting("Qwen2.5-3B", here), here)]
    assert any("trainer.n_gpus_per_node" in change for change in changes)


def test_the_least_change_of_a_kind_is_proposed() -> None:
    """The engine's share is lowered no further than is needed."""
    here, config = machine(8, 79, 1024), run(8)
    config.actor_rollout_ref.rollout.gpu_memory_utilization = 0.9
    what, key = setting("Qwen2.5-7B", here), "actor_rollout_ref.rollout.gpu_memory_utilization"
    shares = [change[key] for change, _ in proposals(config, what, here) if set(change) == {key}]
    (share,) = shares
    above = changed(config, {key: share + 0.05})
    assert shortages(above, estimate(above, what), here, CLOSE)


def test_a_small_shared_memory_is_found() -> None:
    """A container's 64 MB of /dev/shm do not hold the weights; elsewhere there is plenty."""
    here, config = machine(8, 79, 1024), run(8)
    small = Machine(here.host, 64 << 20, here.devices)
    found = estimate(config, setting("Qwen2.5-0.5B", here))
    (short,) = shortages(config, found, small, REFUSED)
    assert short.place is Place.SHARED
    assert "/dev/shm needs about 1.98 GB" in shortage_line(short, found)


def test_an_engine_without_room_for_one_dialogue_is_found() -> None:
    """Weights alone fill its share: vLLM would refuse to start."""
    here, config = machine(1, 79, 1024), run(1)
    config.actor_rollout_ref.model.lora_rank = 8
    config.actor_rollout_ref.rollout.gpu_memory_utilization = 0.2
    found = estimate(config, setting("Qwen2.5-7B", here))
    (short,) = shortages(config, found, here, REFUSED)
    assert "KV cache for one trajectory of 4596 tokens" in shortage_line(short, found)


def test_the_table_adds_up() -> None:
    """The lines of a place sum to its total, and the phase of the peak is named."""
    here, config = machine(8, 79, 1024), run(8)
    found = estimate(config, setting("Qwen2.5-7B", here))
    lines = table(found, here).splitlines()
    device = [line.split() for line in lines if line.startswith("  each GPU")]
    parts = [float(words[2]) for words in device[:-2]]
    assert sum(parts) == pytest.approx(float(device[-2][2]), abs=0.2)
    assert lines[len(device) - 2].endswith(f"of 84.8 GB free, in {found.peak(Place.DEVICE)}")
    assert "(91.4 GB)  copy of the shards being saved" in table(found, here)


def test_amounts_read_well() -> None:
    """Three digits."""
    assert [amount(n) for n in (5e6, 0.5e9, 2e9, 61.25e9)] == ["5 MB", "0.5 GB", "2 GB", "61.2 GB"]


def test_a_proposal_can_be_typed() -> None:
    """Options as the command line takes them."""
    found = estimate(run(8), setting("Qwen2.5-0.5B", machine(8, 79, 1024)))
    change = {"a.b": True, "c": 0.5}
    assert proposal_line(change, found).startswith("a.b=true c=0.5: needs ")


def test_the_hosts_limit_counts() -> None:
    """Offloading to a host without room is refused for the host's sake."""
    here = machine(8, 79, 1024)
    config = changed(run(8), {"actor_rollout_ref.actor.fsdp_config.param_offload": True})
    tight = Machine(HostMemory(64 * GIB, 64 * GIB), here.shared_free, here.devices)
    found = estimate(config, setting("Qwen2.5-7B", here))
    (short,) = shortages(config, found, tight, REFUSED)
    assert short.place is Place.HOST
