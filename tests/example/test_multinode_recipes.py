"""The recipes in example/multinode: valid options, the paper's settings, enough memory."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.test_train_scripts import arguments, config_of
from tests.verl.ext.memory.shapes import shape_of
from verl.config import Config
from verl.ext.memory.check import choose_memory
from verl.ext.memory.estimate import WARN_ABOVE, Setting, Shortage, estimate
from verl.ext.memory.needs import Memory
from verl.machine import DeviceMemory, HostMemory, Machine

FOLDER = Path(__file__).parents[2] / "example" / "multinode"
GIB = 2**30
GPU = DeviceMemory(total=int(79.2 * GIB), free=int(78.5 * GIB))
NODE = Machine(HostMemory(1000 * GIB, 950 * GIB), shared_free=500 * GIB, devices=(GPU,) * 8)
"""A node with 8 x 80 GB and 1 TB of host memory, half of it for /dev/shm, as Linux mounts it."""
RECIPES = {"7b": ("Qwen2.5-7B", 2), "32b": ("Qwen2.5-32B", 4), "72b": ("Qwen2.5-72B", 8)}


def recipe(size: str, algo: str, folder: Path, **environment: str) -> Config:
    script = str(FOLDER.relative_to(Path(__file__).parents[2]) / f"train_{size}.sh")
    return config_of(script, folder, RAY_ADDRESS="head:6379", ALGO=algo, **environment)


def shortages_of(config: Config) -> list[Shortage]:
    """Return the memory that a node of the recipe lacks, with a margin."""
    shape = shape_of(config.actor_rollout_ref.model.path)
    setting = Setting(shape, shape, True, NODE)
    config = choose_memory(config, setting)
    return estimate(config, setting).shortages(config, NODE, WARN_ABOVE)


@pytest.mark.parametrize("algo", ["grpo", "ppo"])
@pytest.mark.parametrize("size", RECIPES)
def test_recipes_fit_their_nodes(size: str, algo: str, tmp_path: Path) -> None:
    """Model and number of nodes match the name, and a tenth of the memory stays free."""
    config = recipe(size, algo, tmp_path)
    name, num_nodes = RECIPES[size]
    assert config.actor_rollout_ref.model.path == f"Qwen/{name}"
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == (num_nodes, 8)
    assert config.algorithm.adv_estimator == {"grpo": "grpo", "ppo": "gae"}[algo]
    assert config.trainer.resume_mode == "auto"
    assert Path(config.trainer.default_local_dir).is_absolute()
    assert (config.data.train_batch_size, config.actor_rollout_ref.actor.optim.lr) == (512, 1e-6)
    assert shortages_of(config) == []


def test_the_estimate_refuses_too_few_nodes(tmp_path: Path) -> None:
    """72B on two nodes lacks device memory, so the test above can fail."""
    shortages = shortages_of(recipe("72b", "grpo", tmp_path, N_NODES="2"))
    assert Memory.DEVICE in {shortage.memory for shortage in shortages}


def test_a_recipe_needs_a_cluster(tmp_path: Path) -> None:
    """Without RAY_ADDRESS a recipe fails with a message, but can still print its options."""
    with pytest.raises(RuntimeError, match=r"^2: RAY_ADDRESS is not set"):
        arguments("example/multinode/train_7b.sh", tmp_path)
    printed = arguments("example/multinode/train_7b.sh", tmp_path, "--cfg", "job")
    assert printed[-2:] == ["--cfg", "job"]


@pytest.mark.parametrize("script", sorted(path.name for path in FOLDER.glob("*.sh")))
def test_script_is_valid_bash(script: str) -> None:
    """Bash parses the script without errors."""
    subprocess.run(["bash", "-n", str(FOLDER / script)], check=True, timeout=30)
