"""example/multinode: each recipe composes, is the paper's, and fits its nodes by the estimate."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.test_train_scripts import arguments, config_of
from tests.verl.preflight.memory.shapes import shape_of
from verl.config import Config
from verl.machine import DeviceMemory, HostMemory, Machine
from verl.preflight.memory.estimate import WARN_ABOVE, Setting, Shortage, estimate
from verl.preflight.memory.needs import Memory

FOLDER = Path(__file__).parents[2] / "example" / "multinode"
GIB = 2**30
GPU = DeviceMemory(total=int(79.2 * GIB), free=int(78.5 * GIB))
NODE = Machine(HostMemory(1000 * GIB, 950 * GIB), shared_free=500 * GIB, devices=(GPU,) * 8)
"""8 x 80 GB, 1 TB of host memory, half of it for /dev/shm as Linux mounts it."""
RECIPES = {"7b": ("Qwen2.5-7B", 2), "32b": ("Qwen2.5-32B", 4), "72b": ("Qwen2.5-72B", 8)}


def recipe(size: str, algo: str, folder: Path, **environment: str) -> Config:
    script = str(FOLDER.relative_to(Path(__file__).parents[2]) / f"train_{size}.sh")
    return config_of(script, folder, RAY_ADDRESS="head:6379", ALGO=algo, **environment)


def short_of(config: Config) -> list[Shortage]:
    """What a node of the recipe has too little of, with a margin."""
    shape = shape_of(config.actor_rollout_ref.model.path)
    setting = Setting(shape, shape, True, NODE)
    return estimate(config, setting).shortages(config, NODE, WARN_ABOVE)


@pytest.mark.parametrize("algo", ["grpo", "ppo"])
@pytest.mark.parametrize("size", RECIPES)
def test_recipes_fit_their_nodes(size: str, algo: str, tmp_path: Path) -> None:
    """Model, nodes and engine sizes are as the name says, and leave a tenth of the memory free."""
    config = recipe(size, algo, tmp_path)
    name, num_nodes = RECIPES[size]
    assert config.actor_rollout_ref.model.path == f"Qwen/{name}"
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == (num_nodes, 8)
    assert config.algorithm.adv_estimator == {"grpo": "grpo", "ppo": "gae"}[algo]
    assert config.trainer.resume_mode == "auto"
    assert Path(config.trainer.default_local_dir).is_absolute()
    assert (config.data.train_batch_size, config.actor_rollout_ref.actor.optim.lr) == (512, 1e-6)
    assert short_of(config) == []


def test_the_estimate_would_refuse_too_few_nodes(tmp_path: Path) -> None:
    """72B on two nodes is short of device memory: the check above can fail."""
    places = {short.memory for short in short_of(recipe("72b", "grpo", tmp_path, N_NODES="2"))}
    assert Memory.DEVICE in places


def test_a_recipe_needs_a_cluster(tmp_path: Path) -> None:
    """Without RAY_ADDRESS a recipe says what to export, but still prints its options."""
    with pytest.raises(RuntimeError, match=r"^2: RAY_ADDRESS is not set"):
        arguments("example/multinode/train_7b.sh", tmp_path)
    printed = arguments("example/multinode/train_7b.sh", tmp_path, "--cfg", "job")
    assert printed[-2:] == ["--cfg", "job"]


@pytest.mark.parametrize("script", sorted(path.name for path in FOLDER.glob("*.sh")))
def test_script_is_sound_bash(script: str) -> None:
    """Bash parses every line of it."""
    subprocess.run(["bash", "-n", str(FOLDER / script)], check=True, timeout=30)
