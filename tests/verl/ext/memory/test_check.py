"""A run that does not fit this machine's memory is refused before anything is loaded."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import pytest
from torch._subclasses.fake_tensor import DataDependentOutputException

from tests.test_train_scripts import config_of
from tests.verl.ext.memory.shapes import shape_of
from tests.verl.ext.memory.test_presets import machine
from tests.verl.ext.memory.test_shortages import run, setting
from tests.verl.training.ranks import save_tiny, tiny_config
from verl.config import Config
from verl.config.known import check
from verl.errors import ConfigError, ResourceError, UserError
from verl.ext.memory import check as memory
from verl.ext.memory.check import choose_memory, decide_offload_and_budgets, read_setting
from verl.ext.memory.estimate import Estimate, Setting, estimate
from verl.ext.memory.needs import Memory
from verl.machine import HostMemory, Machine
from verl.preflight.undecided import (
    OFFLOAD_OPTIONS,
    fill_undecided,
    offload_everything,
    undecided,
    undecided_offloads,
    with_options,
)

GIB = 1 << 30


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests run without a Ray cluster."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A tiny run on the CPU."""
    return tiny_config(save_tiny(tmp_path / "model"))


def memory_problems(config: Config) -> list[UserError]:
    """Return the problems that the memory preflight reports on this machine."""
    return list(memory.memory_problems(config, read_setting(config)))


def with_memory(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """Pretend a host of 64 GiB with `free` bytes free."""
    machine = Machine(HostMemory(64 * GIB, free), 32 * GIB)
    monkeypatch.setattr(memory.Machine, "now", lambda with_devices: machine)


def test_a_run_that_fits_logs_its_needs(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The table is logged, and there is no problem."""
    with_memory(monkeypatch, 60 * GIB)
    with caplog.at_level(logging.INFO):
        assert memory_problems(config) == []
    assert "engines: KV cache" in caplog.text and "of 64.4 GB free" in caplog.text
    assert not [r for r in caplog.records if r.levelno > logging.INFO]


def test_a_run_that_cannot_fit_is_refused(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has needed and free memory, options that need less, and how to start anyway."""
    config.actor_rollout_ref.rollout.cpu_kv_cache_gib = 40
    with_memory(monkeypatch, 5 * GIB)
    (problem,) = memory_problems(config)
    assert isinstance(problem, ResourceError)
    text = str(problem)
    assert "host needs about" in text and "but 5.37 GB is free" in text
    assert "trainer.memory_preflight=warn" in text and "cpu_kv_cache_gib=1" in text


def test_a_small_shared_memory_has_its_own_fix(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No option enlarges /dev/shm."""
    machine = Machine(HostMemory(64 * GIB, 60 * GIB), 1 << 10)
    monkeypatch.setattr(memory.Machine, "now", lambda with_devices: machine)
    (problem,) = memory_problems(config)
    assert "/dev/shm needs about" in str(problem) and "--shm-size" in str(problem)


def test_no_run_is_refused_for_the_guess_for_processes(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The memory of Python and Ray is a guess: a busy machine only gets a warning."""
    with_memory(monkeypatch, 4 * GIB)
    assert memory_problems(config) == []
    assert "host needs about" in caplog.text


@pytest.mark.parametrize("way", ["warn", "cluster"])
def test_a_refusal_can_become_a_warning(
    way: str, config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By an option, and on a cluster, where the memory of other nodes is unknown."""
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
    """Nothing is read and nothing is logged."""
    with_memory(monkeypatch, 0)
    config.trainer.memory_preflight = "off"
    with caplog.at_level(logging.INFO):
        assert memory_problems(config) == []
    assert caplog.text == ""


def test_an_unknown_model_is_not_judged(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For a model that is not on this disk, the log says that nothing was estimated."""
    with_memory(monkeypatch, 0)
    config.actor_rollout_ref.model.path = "nobody/nothing"
    with caplog.at_level(logging.INFO):
        assert memory_problems(config) == []
    assert "not estimated" in caplog.text


def test_a_model_that_reads_tensor_values_is_not_judged(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Meta tensors have none; the run is not refused, and its offload options are decided."""

    def reads(*_: object) -> Estimate:
        raise DataDependentOutputException("aten._local_scalar_dense")

    monkeypatch.setattr(memory, "estimate", reads)
    with caplog.at_level(logging.INFO):
        assert memory_problems(config) == []
    assert "cannot be tried on meta tensors" in caplog.text
    assert undecided(decide_offload_and_budgets(config, None)) == []


def test_the_memory_option_is_checked(config: Config) -> None:
    """An invalid word is refused."""
    config.trainer.memory_preflight = "maybe"
    with pytest.raises(ConfigError) as caught:
        check(config)
    assert "trainer.memory_preflight" in str(caught.value)


def open_run(device: str) -> Config:
    """Return PPO of Qwen2.5-3B on 8 devices, with undecided offload options."""
    config = run(8, "gae")
    config.trainer.device, config.trainer.compute_dtype = device, "bfloat16"
    return config


def outlook(gib: float) -> Setting:
    """Return a setting with eight GPUs of this size in a host of 1 TB."""
    here, shape = machine(8, gib, 1000), shape_of("Qwen2.5-3B")
    return Setting(shape, shape, True, here)


@pytest.mark.parametrize("address", ["", "10.0.0.1:6379"])
def test_offload_is_chosen_by_the_gpus_of_this_node(
    address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also on a cluster; one log line has the choice and the reason."""
    monkeypatch.setenv("RAY_ADDRESS", address)
    config, seen = open_run("cuda"), outlook(39.5)
    with caplog.at_level(logging.INFO):
        chosen = decide_offload_and_budgets(config, seen)
    assert undecided(chosen) == [] and undecided(config) == list(OFFLOAD_OPTIONS)
    assert chosen == choose_memory(config, seen) != fill_undecided(config)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "offload to the host: reference's weights; each GPU needs" in record.message


@pytest.mark.parametrize("device", ["cuda", "auto"])
@pytest.mark.parametrize("sees", ["no estimate", "no GPU"])
def test_everything_is_offloaded_without_an_estimate(
    device: str, sees: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For an unknown model, and for GPUs on other nodes only; the log says how to choose."""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    config = open_run(device)
    seen = outlook(39.5)
    blind = replace(seen, machine=Machine(seen.machine.host, seen.machine.shared_free))
    chosen = decide_offload_and_budgets(config, None if sees == "no estimate" else blind)
    assert chosen == offload_everything(config) and undecided(chosen) == []
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "OFFLOAD=false (train_*.sh), or actor_rollout_ref.ref.fsdp_config." in record.message
    assert record.message.count("_offload=false") == 5


def test_nothing_is_offloaded_from_a_cpu(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Null becomes false without a log line, with or without an estimate, on a cluster too."""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with caplog.at_level(logging.INFO):
        chosen = decide_offload_and_budgets(open_run("cpu"), None)
    assert chosen == fill_undecided(open_run("cpu")) and caplog.text == ""


def test_options_that_are_set_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    """A command line that sets all options keeps its values, and nothing is logged."""
    config = offload_everything(open_run("cuda"))
    assert decide_offload_and_budgets(config, outlook(140.0)) == config
    assert decide_offload_and_budgets(config, None) == config
    assert caplog.text == ""


ACTOR, REFERENCE, CRITIC = (
    "actor_rollout_ref.actor.fsdp_config",
    "actor_rollout_ref.ref.fsdp_config",
    "critic.model.fsdp_config",
)
COSTS = {
    f"{REFERENCE}.param_offload": 1,
    f"{CRITIC}.optimizer_offload": 2,
    f"{ACTOR}.optimizer_offload": 4,
    f"{CRITIC}.param_offload": 8,
    f"{ACTOR}.param_offload": 16,
}
SHAPES = [("Qwen2.5-1.5B", 1, 1), ("Qwen2.5-3B", 8, 1), ("Qwen2.5-7B", 8, 1), ("Qwen2.5-32B", 8, 2)]


def on_host(config: Config) -> list[str]:
    """Return the offload options that are true."""
    return sorted(key for key in OFFLOAD_OPTIONS if attrgetter(key)(config))


def search(config: Config, what: Setting, here: Machine) -> list[str]:
    """Find the choice by trying every combination for the models of the run, by increasing cost."""
    with_critic = config.algorithm.adv_estimator == "gae"
    keys = [key for key in COSTS if with_critic or not key.startswith(CRITIC)]
    sets = [set(some) for n in range(6) for some in itertools.combinations(keys, n)]
    held: list[set[str]] = []
    for some in sorted(sets, key=lambda some: sum(COSTS[key] for key in some)):
        estimated = estimate(
            with_options(config, {key: key in some for key in OFFLOAD_OPTIONS}), what
        )
        if estimated.peak_bytes(Memory.HOST) <= here.host.free:
            held.append(some)
            if estimated.peak_bytes(Memory.DEVICE) <= 0.9 * here.devices[0].free:
                return sorted(some)
    return sorted(held[-1]) if held else []


@pytest.mark.parametrize(("gpu_gib", "estimator"), [(23.5, "gae"), (39.5, "grpo"), (79.0, "gae")])
@pytest.mark.parametrize(("size", "gpus", "nodes"), SHAPES)
def test_the_choice_is_the_cheapest_that_fits(
    size: str, gpus: int, nodes: int, gpu_gib: float, estimator: str
) -> None:
    """It equals an exhaustive search by cost, on hosts with much and little memory."""
    config = run(gpus, estimator)
    config.trainer.nnodes = nodes
    config.actor_rollout_ref.actor.use_kl_loss = True
    for host_gb in (2000, 150):
        here = machine(gpus, gpu_gib, host_gb)
        chosen = choose_memory(config, setting(size, here))
        assert undecided(chosen) == []
        assert on_host(chosen) == search(config, setting(size, here), here)


def test_a_host_without_room_gets_as_much_as_it_holds() -> None:
    """If nothing fits the GPU, the host is still not filled beyond its memory."""
    config, here = run(2, "gae"), machine(2, 23.5, 256)
    what = setting("Qwen2.5-7B", here)
    chosen = choose_memory(config, what)
    assert on_host(chosen) and on_host(chosen) != on_host(offload_everything(config))
    assert estimate(chosen, what).peak_bytes(Memory.HOST) <= here.host.free
    small = machine(2, 23.5, 16)
    assert on_host(choose_memory(config, setting("Qwen2.5-7B", small))) == []


@pytest.mark.parametrize("value", [True, False])
def test_a_users_choice_is_kept(value: bool) -> None:
    """On a device that is far too small, and on one that is large enough for everything."""
    explicit = with_options(run(8, "gae"), {f"{ACTOR}.param_offload": value})
    for gib in (23.5, 140.0):
        here = machine(8, gib, 1000)
        chosen = choose_memory(explicit, setting("Qwen2.5-3B", here))
        assert chosen.actor_rollout_ref.actor.fsdp_config.param_offload is value
    all_set = with_options(explicit, dict.fromkeys(OFFLOAD_OPTIONS, value))
    assert choose_memory(all_set, setting("Qwen2.5-3B", here)) == all_set == fill_undecided(all_set)


def test_models_that_a_run_lacks_are_not_offloaded() -> None:
    """GRPO has no critic; a run without KL, or with an adapter, has no reference model."""
    grpo = run(8)
    grpo.algorithm.kl_ctrl.kl_coef = 0.0
    assert on_host(offload_everything(grpo)) == [
        f"{ACTOR}.optimizer_offload",
        f"{ACTOR}.param_offload",
    ]
    adapted = with_options(run(8), {"actor_rollout_ref.model.lora_rank": 8})
    assert on_host(offload_everything(adapted)) == on_host(offload_everything(grpo))


def test_a_critic_is_offloaded_with_the_base_that_it_shares() -> None:
    """Its adapter's optimizer state must be on the device of the shared weights."""
    ranks = {"actor_rollout_ref.model.lora_rank": 8, "critic.model.lora_rank": 8}
    config = with_options(run(8, "gae"), ranks)
    assert not [key for key in undecided_offloads(config) if key.startswith(CRITIC)]
    chosen = offload_everything(config)
    assert chosen.critic.model.fsdp_config == chosen.actor_rollout_ref.actor.fsdp_config
    fixed = fill_undecided(with_options(config, {f"{ACTOR}.param_offload": True}))
    assert fixed.critic.model.fsdp_config.param_offload is True


WAITING = {
    "train_grpo.sh": {79.0: [], 39.5: [], 23.5: [f"{REFERENCE}.param_offload"]},
    "train_ppo.sh": {
        79.0: [],
        39.5: [f"{REFERENCE}.param_offload"],
        23.5: [
            f"{ACTOR}.optimizer_offload",
            f"{CRITIC}.optimizer_offload",
        ],
    },
}


@pytest.mark.parametrize("recipe", WAITING)
def test_the_recipes_offload_what_the_page_says(recipe: str, tmp_path: Path) -> None:
    """Qwen2.5-3B on eight GPUs, as in docs/guides/models.md."""
    config = config_of(recipe, tmp_path)
    for gpu_gib, waiting in WAITING[recipe].items():
        here = machine(8, gpu_gib, 1000)
        assert on_host(choose_memory(config, setting("Qwen2.5-3B", here))) == waiting
