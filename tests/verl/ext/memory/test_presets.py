"""Each preset fits its machine with a margin, and offloads only what that needs."""

from operator import attrgetter
from pathlib import Path

import pytest

from tests.test_train_scripts import ROOT, arguments, config_of
from tests.verl.ext.memory.shapes import FACTS, shape_of
from verl.config import Config
from verl.ext.memory.check import choose_memory
from verl.ext.memory.estimate import REFUSE_ABOVE, WARN_ABOVE, Setting, estimate
from verl.machine import DeviceMemory, HostMemory, Machine
from verl.preflight.undecided import OFFLOAD_OPTIONS

GIB = 1 << 30
SIZES = list(FACTS)
RECIPES = ("train_grpo.sh", "train_ppo.sh")


def machine(gpus: int, gpu_gib: float, host_gb: int) -> Machine:
    """Return a machine with all memory free; an 80 GB card has 79 GiB, a 24 GB card 23.5 GiB."""
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
    """Return the options with offload decided, and the setting of the estimate."""
    shape = shape_of(size)
    setting = Setting(shape, shape, True, here)
    return choose_memory(config, setting), setting


def verdict(config: Config, here: Machine, size: str) -> str:
    """Return whether a model under these options fits, hardly fits, or is refused."""
    chosen, setting = settings_for(config, here, size)
    estimated = estimate(chosen, setting)
    if estimated.shortages(chosen, here, REFUSE_ABOVE):
        return "refused"
    return "close" if estimated.shortages(chosen, here, WARN_ABOVE) else "fits"


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("preset", MACHINES)
def test_a_preset_fits_its_machine(preset: str, recipe: str, tmp_path: Path) -> None:
    """As in docs/guides/models.md: its model fits so, the next larger one never does."""
    config = config_of(recipe, tmp_path, PRESET=preset)
    here = MACHINES[preset]
    assert config.placement.actor.num_ranks == len(here.devices)
    size = config.actor_rollout_ref.model.path.removeprefix("Qwen/")
    second = SIZES[SIZES.index(size) + 2]
    assert verdict(config, here, size) == "fits"
    assert verdict(config, here, second) == "refused"
    chosen, _ = settings_for(config, here, size)
    waiting = [key for key in OFFLOAD_OPTIONS if attrgetter(key)(chosen)]
    assert waiting == WAITING.get((preset, recipe), [])


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_engine_holds_many_dialogues(recipe: str, tmp_path: Path) -> None:
    """A preset must be useful: the KV cache holds 40 whole trajectories."""
    for preset, here in MACHINES.items():
        config = config_of(recipe, tmp_path, PRESET=preset)
        shape = shape_of(config.actor_rollout_ref.model.path)
        estimated = estimate(config, Setting(shape, shape, True, here))
        assert estimated.engine is not None
        assert estimated.engine.cached_tokens > 40 * config.data.max_model_len, preset


def test_variables_win_over_a_preset(tmp_path: Path) -> None:
    """A preset only sets what is not set yet."""
    config = config_of("train_grpo.sh", tmp_path, PRESET="2x80", BASE_MODEL="m", N_GPUS="4")
    assert (config.actor_rollout_ref.model.path, config.trainer.n_gpus_per_node) == ("m", 4)
    rollout = config.actor_rollout_ref.rollout
    assert rollout.gpu_memory_utilization == 0.4


def test_an_unknown_preset_is_refused(tmp_path: Path) -> None:
    """The message names the existing ones."""
    with pytest.raises(RuntimeError, match=r"^2: PRESET: got x, expected one of 1x24 1x80 2x80"):
        arguments("train_grpo.sh", tmp_path, PRESET="x")


def test_every_preset_is_tested() -> None:
    """Every preset has a machine in this file."""
    assert {path.stem for path in (ROOT / "scripts/presets").glob("*.sh")} == set(MACHINES)
