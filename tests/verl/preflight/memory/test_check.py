"""A run that this machine has not the memory for is told so before anything is loaded."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from torch._subclasses.fake_tensor import DataDependentOutputException

from tests.verl.preflight.memory.shapes import shape_of
from tests.verl.preflight.memory.test_presets import machine
from tests.verl.preflight.memory.test_shortages import run
from tests.verl.training.ranks import save_tiny, tiny_config
from verl.config import Config
from verl.config.known import check
from verl.errors import ConfigError, ResourceError, UserError
from verl.machine import HostMemory, Machine
from verl.preflight.memory import check as memory
from verl.preflight.memory.check import (
    KEYS,
    choose,
    everything,
    look,
    settle_offload,
    settled,
    undecided,
)
from verl.preflight.memory.estimate import Estimate, Setting

GIB = 1 << 30


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cluster is joined."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A tiny run on the CPU."""
    return tiny_config(save_tiny(tmp_path / "model"))


def memory_problems(config: Config) -> list[UserError]:
    """What the preflight finds in this machine's memory."""
    return list(memory.memory_problems(config, look(config)))


def with_memory(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """A host of 64 GiB of which `free` bytes are free."""
    machine = Machine(HostMemory(64 * GIB, free), 32 * GIB)
    monkeypatch.setattr(memory.Machine, "now", lambda with_devices: machine)


def test_a_run_that_fits_logs_its_needs(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The table is in the log, nothing stands in the way."""
    with_memory(monkeypatch, 60 * GIB)
    with caplog.at_level(logging.INFO):
        assert memory_problems(config) == []
    assert "engines: KV cache" in caplog.text and "of 64.4 GB free" in caplog.text
    assert not [r for r in caplog.records if r.levelno > logging.INFO]


def test_a_run_that_cannot_fit_is_refused(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what is needed, what is free, which options need less, and how to start all the same."""
    config.actor_rollout_ref.rollout.cpu_kv_cache_gib = 40
    with_memory(monkeypatch, 5 * GIB)
    (problem,) = memory_problems(config)
    assert isinstance(problem, ResourceError)
    text = str(problem)
    assert "host needs about" in text and "but 5.37 GB is free" in text
    assert "trainer.memory_preflight=warn" in text and "cpu_kv_cache_gib=1" in text


def test_a_small_shared_memory_has_a_fix_of_its_own(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No option makes /dev/shm larger."""
    machine = Machine(HostMemory(64 * GIB, 60 * GIB), 1 << 10)
    monkeypatch.setattr(memory.Machine, "now", lambda with_devices: machine)
    (problem,) = memory_problems(config)
    assert "/dev/shm needs about" in str(problem) and "--shm-size" in str(problem)


def test_nothing_is_refused_for_its_processes(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What Python and Ray take is a guess: a busy machine gets a warning."""
    with_memory(monkeypatch, 4 * GIB)
    assert memory_problems(config) == []
    assert "host needs about" in caplog.text


@pytest.mark.parametrize("way", ["warn", "cluster"])
def test_a_refusal_can_become_a_warning(
    way: str, config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By option, and on a cluster, whose other nodes are not seen from here."""
    config.actor_rollout_ref.rollout.cpu_kv_cache_gib = 40
    with_memory(monkeypatch, 5 * GIB)
    if way == "warn":
        config.trainer.memory_preflight = "warn"
    else:
        monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert memory_problems(config) == []
    (record,) = (r for r in caplog.records if r.levelno == logging.WARNING)
    assert "host needs about" in record.message


def test_it_can_be_switched_off(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is read, nothing said."""
    with_memory(monkeypatch, 0)
    config.trainer.memory_preflight = "off"
    with caplog.at_level(logging.INFO):
        assert memory_problems(config) == []
    assert caplog.text == ""


def test_an_unknown_model_is_not_judged(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A model that is not on this disk is said not to be estimated."""
    with_memory(monkeypatch, 0)
    config.actor_rollout_ref.model.path = "nobody/nothing"
    with caplog.at_level(logging.INFO):
        assert memory_problems(config) == []
    assert "not estimated" in caplog.text


def test_a_model_that_reads_its_values_is_not_judged(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Fake tensors have none; the run is not stopped for it, and its offload is decided."""

    def reads(*_: object) -> Estimate:
        raise DataDependentOutputException("aten._local_scalar_dense")

    monkeypatch.setattr(memory, "estimate", reads)
    with caplog.at_level(logging.INFO):
        assert memory_problems(config) == []
    assert "cannot be tried on fake tensors" in caplog.text
    assert undecided(settle_offload(config, None)) == []


def test_words_and_shares_are_checked(config: Config) -> None:
    """Options of memory take what they say."""
    config.trainer.memory_preflight = "maybe"
    config.trainer.memory_low = 2.0
    with pytest.raises(ConfigError) as caught:
        check(config)
    assert "trainer.memory_preflight" in str(caught.value)
    assert "trainer.memory_low" in str(caught.value)


def open_run(device: str) -> Config:
    """PPO of Qwen2.5-3B on 8 devices, by options that leave offload open."""
    config = run(8, "gae")
    config.trainer.device, config.trainer.compute_dtype = device, "bfloat16"
    return config


def outlook(gib: float) -> Setting:
    """Eight GPUs of this size in a host of 1 TB."""
    here, shape = machine(8, gib, 1000), shape_of("Qwen2.5-3B")
    return Setting(shape, shape, True, here)


@pytest.mark.parametrize("address", ["", "10.0.0.1:6379"])
def test_offload_is_chosen_by_the_gpus_that_are_seen(
    address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also on a cluster, by those of the driver's node; one line tells what and why."""
    monkeypatch.setenv("RAY_ADDRESS", address)
    config, seen = open_run("cuda"), outlook(39.5)
    with caplog.at_level(logging.INFO):
        chosen = settle_offload(config, seen)
    assert undecided(chosen) == [] and undecided(config) == list(KEYS)
    assert chosen == choose(config, seen) != settled(config)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "offload to the host: reference's weights; each GPU needs" in record.message


@pytest.mark.parametrize("device", ["cuda", "auto"])
@pytest.mark.parametrize("sees", ["no estimate", "no GPU"])
def test_what_cannot_be_estimated_is_offloaded(
    device: str, sees: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An unknown model, and GPUs that only other nodes have; the line says how to choose."""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    config = open_run(device)
    seen = outlook(39.5)
    blind = replace(seen, machine=Machine(seen.machine.host, seen.machine.shared_free))
    chosen = settle_offload(config, None if sees == "no estimate" else blind)
    assert chosen == everything(config) and undecided(chosen) == []
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "OFFLOAD=false (train_*.sh), or actor_rollout_ref.ref.fsdp_config." in record.message
    assert record.message.count("_offload=false") == 5


def test_nothing_is_offloaded_from_a_cpu(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Null becomes false without a word, estimate or not, on a cluster too."""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with caplog.at_level(logging.INFO):
        chosen = settle_offload(open_run("cpu"), None)
    assert chosen == settled(open_run("cpu")) and caplog.text == ""


def test_what_is_set_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """A command line that decides all itself gets its own values and no line."""
    config = everything(open_run("cuda"))
    assert settle_offload(config, outlook(140.0)) == config
    assert settle_offload(config, None) == config
    assert caplog.text == ""
