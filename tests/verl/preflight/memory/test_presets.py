"""Each preset fits the machine it is for, with room to spare, and offloads what that takes."""

from operator import attrgetter
from pathlib import Path

import pytest

from tests.test_train_scripts import ROOT, arguments, config_of
from tests.verl.preflight.memory.shapes import FACTS, shape_of
from verl.config import Config
from verl.machine import DeviceMemory, HostMemory, Machine
from verl.preflight.memory.check import OFFLOAD_KEYS, choose_offload
from verl.preflight.memory.estimate import REFUSE_ABOVE, WARN_ABOVE, Setting, estimate

GIB = 1 << 30
SIZES = list(FACTS)
RECIPES = ("train_grpo.sh", "train_ppo.sh")


def machine(gpus: int, gpu_gib: float, host_gb: int) -> Machine:
    """All of it free; a card of 80 GB has 79 GiB, one of 24 GB 23.5 GiB. /dev/shm has half."""
    device = DeviceMemory(int(gpu_gib * GIB), int(gpu_gib * GIB))
    host = int(host_gb * 1e9)
    return Machine(HostMemory(host, host), host // 2, (device,) * gpus)


MACHINES = {
    "1x24": machine(1, 23.5, 64),
    "1x80": machine(1, 79, 128),
    "2x80": machine(2, 79, 256),
    "8x80": machine(8, 79, 1024),
}


WAITING = {("2x80", "train_ppo.sh"): ["actor_rollout_ref.ref.fsdp_config.param_offload"]}
"""What waits on the host; nothing for all others."""


def settings_for(config: Config, here: Machine, size: str) -> tuple[Config, Setting]:
    """The options with what waits on the host decided, and what their estimate rests on."""
    shape = shape_of(size)
    setting = Setting(shape, shape, True, here)
    return choose_offload(config, setting), setting


def verdict(config: Config, here: Machine, size: str) -> str:
    """What the preflight makes of this model under these options."""
    chosen, setting = settings_for(config, here, size)
    found = estimate(chosen, setting)
    if found.shortages(chosen, here, REFUSE_ABOVE):
        return "refused"
    return "close" if found.shortages(chosen, here, WARN_ABOVE) else "fits"


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("preset", MACHINES)
def test_a_preset_fits_its_machine(preset: str, recipe: str, tmp_path: Path) -> None:
    """As docs/memory.md has it: its model fits by what it offloads, the second larger never."""
    config = config_of(recipe, tmp_path, PRESET=preset)
    here = MACHINES[preset]
    assert config.num_ranks == len(here.devices)
    size = config.actor_rollout_ref.model.path.removeprefix("Qwen/")
    second = SIZES[SIZES.index(size) + 2]
    assert verdict(config, here, size) == "fits"
    assert verdict(config, here, second) == "refused"
    chosen, _ = settings_for(config, here, size)
    waiting = [key for key in OFFLOAD_KEYS if attrgetter(key)(chosen)]
    assert waiting == WAITING.get((preset, recipe), [])


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_engine_holds_many_dialogues(recipe: str, tmp_path: Path) -> None:
    """What fits must be worth running: the KV cache has room for 40 whole trajectories."""
    for preset, here in MACHINES.items():
        config = config_of(recipe, tmp_path, PRESET=preset)
        shape = shape_of(config.actor_rollout_ref.model.path)
        found = estimate(config, Setting(shape, shape, True, here))
        assert found.engine is not None
        assert found.engine.cached_tokens > 40 * config.data.max_model_len, preset


def test_variables_win_over_a_preset(tmp_path: Path) -> None:
    """A preset only fills in what is not set."""
    config = config_of("train_grpo.sh", tmp_path, PRESET="2x80", BASE_MODEL="m", N_GPUS="4")
    assert (config.actor_rollout_ref.model.path, config.trainer.n_gpus_per_node) == ("m", 4)
    rollout = config.actor_rollout_ref.rollout
    assert rollout.gpu_memory_utilization == 0.4


def test_an_unknown_preset_is_told(tmp_path: Path) -> None:
    """With the names of those that there are."""
    with pytest.raises(RuntimeError, match=r"^2: PRESET: got x, expected one of 1x24 1x80 2x80"):
        arguments("train_grpo.sh", tmp_path, PRESET="x")


def test_every_preset_is_tested() -> None:
    """None without a machine."""
    assert {path.stem for path in (ROOT / "scripts/presets").glob("*.sh")} == set(MACHINES)
