"""What waits on the host is the cheapest that fits, and only what was left open."""

from __future__ import annotations

import itertools
import logging
from operator import attrgetter
from pathlib import Path

import pytest

from tests.test_train_scripts import config_of
from tests.verl.preflight.memory.test_presets import machine
from tests.verl.preflight.memory.test_shortages import run, setting
from verl.config import Config
from verl.machine import Machine
from verl.preflight.memory.check import (
    KEYS,
    changed,
    choose,
    everything,
    open_choices,
    settle_offload,
    settled,
    undecided,
)
from verl.preflight.memory.estimate import Setting, estimate
from verl.preflight.memory.needs import Memory

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
    """The options that are on."""
    return sorted(key for key in KEYS if attrgetter(key)(config))


def search(config: Config, what: Setting, here: Machine) -> list[str]:
    """By trying every combination of the parts that the run has, in the order of their cost."""
    with_critic = config.algorithm.adv_estimator == "gae"
    keys = [key for key in COSTS if with_critic or not key.startswith(CRITIC)]
    sets = [set(some) for n in range(6) for some in itertools.combinations(keys, n)]
    held: list[set[str]] = []
    for some in sorted(sets, key=lambda some: sum(COSTS[key] for key in some)):
        found = estimate(changed(config, {key: key in some for key in KEYS}), what)
        if found.most(Memory.HOST) <= here.host.free:
            held.append(some)
            if found.most(Memory.DEVICE) <= 0.9 * here.devices[0].free:
                return sorted(some)
    return sorted(held[-1]) if held else []


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
@pytest.mark.parametrize("gpu_gib", [23.5, 39.5, 79.0, 140.0])
@pytest.mark.parametrize(("size", "gpus", "nodes"), SHAPES)
def test_the_choice_is_the_cheapest_that_fits(
    size: str, gpus: int, nodes: int, gpu_gib: float, estimator: str
) -> None:
    """As an exhaustive search by cost finds it, on hosts with and without room."""
    config = run(gpus, estimator)
    config.trainer.nnodes = nodes
    config.actor_rollout_ref.actor.use_kl_loss = True
    for host_gb in (2000, 150):
        here = machine(gpus, gpu_gib, host_gb)
        chosen = choose(config, setting(size, here))
        assert undecided(chosen) == []
        assert on_host(chosen) == search(config, setting(size, here), here)


def test_choices_differ_with_the_device() -> None:
    """The smaller the device, the more waits on the host; with room, nothing does."""
    config, counts = run(8, "gae"), []
    for gib in (140.0, 79.0, 39.5, 23.5):
        here = machine(8, gib, 1000)
        counts.append(len(on_host(choose(config, setting("Qwen2.5-3B", here)))))
    assert counts[0] == 0 and counts == sorted(counts) and counts[-1] > counts[-2] > 0


def test_a_host_without_room_gets_as_much_as_it_holds() -> None:
    """Where nothing fits the GPU, the host is not filled beyond its memory for it."""
    config, here = run(2, "gae"), machine(2, 23.5, 256)
    what = setting("Qwen2.5-7B", here)
    chosen = choose(config, what)
    assert on_host(chosen) and on_host(chosen) != on_host(everything(config))
    assert estimate(chosen, what).most(Memory.HOST) <= here.host.free
    small = machine(2, 23.5, 16)
    assert on_host(choose(config, setting("Qwen2.5-7B", small))) == []


@pytest.mark.parametrize("value", [True, False])
def test_what_a_user_set_stays(value: bool) -> None:
    """On a device that is far too small, and on one with room for all."""
    explicit = changed(run(8, "gae"), {f"{ACTOR}.param_offload": value})
    for gib in (23.5, 140.0):
        here = machine(8, gib, 1000)
        chosen = choose(explicit, setting("Qwen2.5-3B", here))
        assert chosen.actor_rollout_ref.actor.fsdp_config.param_offload is value
    all_set = changed(explicit, dict.fromkeys(KEYS, value))
    assert choose(all_set, setting("Qwen2.5-3B", here)) == all_set == settled(all_set)


def test_parts_that_a_run_lacks_are_not_offloaded() -> None:
    """GRPO has no critic, a run without KL no reference, and below an adapter there is none."""
    grpo = run(8)
    grpo.algorithm.kl_ctrl.kl_coef = 0.0
    assert on_host(everything(grpo)) == [f"{ACTOR}.optimizer_offload", f"{ACTOR}.param_offload"]
    adapted = changed(run(8), {"actor_rollout_ref.model.lora_rank": 8})
    assert on_host(everything(adapted)) == on_host(everything(grpo))


def test_a_critic_goes_with_the_base_that_it_shares() -> None:
    """Its adapter's optimizer state must lie where the base's offload puts its weights."""
    ranks = {"actor_rollout_ref.model.lora_rank": 8, "critic.model.lora_rank": 8}
    config = changed(run(8, "gae"), ranks)
    assert not [key for key in open_choices(config) if key.startswith(CRITIC)]
    chosen = everything(config)
    assert chosen.critic.model.fsdp_config == chosen.actor_rollout_ref.actor.fsdp_config
    fixed = settled(changed(config, {f"{ACTOR}.param_offload": True}))
    assert fixed.critic.model.fsdp_config.param_offload is True


def test_the_line_says_what_and_why(caplog: pytest.LogCaptureFixture) -> None:
    """What waits on the host, what a GPU then needs, and what it would need otherwise."""
    config = run(8, "gae")
    config.trainer.device = "cuda"
    for gib in (39.5, 140.0):
        here = machine(8, gib, 1000)
        with caplog.at_level(logging.INFO):
            settle_offload(config, setting("Qwen2.5-3B", here))
    some, none = (record.getMessage() for record in caplog.records)
    assert some.startswith("offload to the host: reference's weights; each GPU needs ")
    assert "of 42.4 GB free, and would need " in some and some.endswith("GB otherwise")
    assert none.startswith("offload to the host: nothing; each GPU needs ")
    assert none.endswith("GB free")


WAITING = {
    "train_grpo.sh": {79.0: [], 39.5: [], 23.5: [f"{ACTOR}.optimizer_offload"]},
    "train_ppo.sh": {
        79.0: [],
        39.5: [f"{REFERENCE}.param_offload"],
        23.5: [
            f"{ACTOR}.optimizer_offload",
            f"{REFERENCE}.param_offload",
            f"{CRITIC}.optimizer_offload",
        ],
    },
}


@pytest.mark.parametrize("recipe", WAITING)
def test_the_recipes_offload_what_the_page_says(recipe: str, tmp_path: Path) -> None:
    """Qwen2.5-3B on eight GPUs, as in docs/memory.md."""
    config = config_of(recipe, tmp_path)
    for gpu_gib, waiting in WAITING[recipe].items():
        here = machine(8, gpu_gib, 1000)
        assert on_host(choose(config, setting("Qwen2.5-3B", here))) == waiting
