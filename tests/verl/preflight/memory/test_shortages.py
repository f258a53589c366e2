"""What cannot fit is found out, and said with the options that need less."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.verl.preflight.memory.shapes import shape_of
from tests.verl.preflight.memory.test_presets import machine
from verl.config import Config
from verl.machine import DeviceMemory, HostMemory, Machine, format_bytes
from verl.preflight.memory.check import hint, shortage_line, table, with_options
from verl.preflight.memory.estimate import REFUSE_ABOVE, WARN_ABOVE, Setting, estimate
from verl.preflight.memory.needs import Memory, Phase

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
    return Setting(shape, shape, True, here)


def test_a_small_shared_memory_is_found() -> None:
    """A container's 64 MB of /dev/shm do not hold the weights; elsewhere there is plenty."""
    here, config = machine(8, 79, 1024), run(8)
    small = Machine(here.host, 64 << 20, here.devices)
    found = estimate(config, setting("Qwen2.5-0.5B", here))
    (short,) = found.shortages(config, small, REFUSE_ABOVE)
    assert short.memory is Memory.SHARED
    assert "/dev/shm needs about 1.98 GB" in shortage_line(short, found)


def test_an_engine_without_room_for_one_dialogue_is_found() -> None:
    """Weights alone fill its share: vLLM would refuse to start."""
    here, config = machine(1, 79, 1024), run(1)
    config.actor_rollout_ref.model.lora_rank = 8
    config.actor_rollout_ref.rollout.gpu_memory_utilization = 0.2
    found = estimate(config, setting("Qwen2.5-7B", here))
    (short,) = found.shortages(config, here, REFUSE_ABOVE)
    assert "KV cache for one trajectory of 4596 tokens" in shortage_line(short, found)


def test_an_engine_of_its_own_takes_nothing_of_a_rank() -> None:
    """A rank's card has the ranks' needs alone, an engine's its share, awake or not; host the rest.

    The oracle for a rank is a run whose engine shares its card, less what that engine holds.
    """
    here, config = machine(8, 79, 1024), run(4)
    config.actor_rollout_ref.rollout.gpu_memory_utilization = 0.9
    config.trainer.device = "cuda"
    config.actor_rollout_ref.model.lora_rank = 8
    beside = estimate(config, setting("Qwen2.5-7B", here))
    config.trainer.rollout_gpus = 4
    alone = estimate(config, setting("Qwen2.5-7B", here))
    assert (
        alone.shortages(config, here, WARN_ABOVE)
        == []
        != beside.shortages(config, here, WARN_ABOVE)
    )
    for phase in Phase:
        rank = [
            n for n in beside.needs_in(Memory.DEVICE, phase) if not n.name.startswith("engine, ")
        ]
        assert alone.needs_in(Memory.DEVICE, phase) == rank
        assert alone.total(Memory.ENGINE, phase) == int(0.9 * here.devices[0].total)
    gone = "sleeping engines' weights"
    assert gone in {need.name for need in beside.needs} - {need.name for need in alone.needs}
    lines = table(alone, here).splitlines()
    assert any(line.startswith("  engine's GPU") and "KV cache" in line for line in lines)


def test_a_critic_on_gpus_of_its_own_takes_nothing_of_the_actors() -> None:
    """The actor's card has what a run without critic has there, and the critic's its own needs.

    The oracle is PPO on shared cards, whose needs are those of both.
    """
    here, config = machine(8, 79, 1024), run(4, "gae")
    together = estimate(config, setting("Qwen2.5-7B", here))
    config.critic.n_gpus_per_node = 4
    apart = estimate(config, setting("Qwen2.5-7B", here))
    actor_alone = with_options(
        config, {"algorithm.adv_estimator": "grpo", "critic.n_gpus_per_node": None}
    )
    alone = estimate(actor_alone, setting("Qwen2.5-7B", here))
    for phase in Phase:
        assert apart.total(Memory.DEVICE, phase) == alone.total(Memory.DEVICE, phase)
        own = [need for need in apart.needs_in(Memory.CRITIC, phase) if "context" not in need.name]
        both = {(need.name, need.bytes) for need in together.needs_in(Memory.DEVICE, phase)}
        assert {(need.name, need.bytes) for need in own} <= both
    assert apart.peak_bytes(Memory.CRITIC) > apart.total(Memory.CRITIC, Phase.GENERATE) > 20 * GIB
    full = Machine(here.host, here.shared_free, (DeviceMemory(80 * GIB, 70 * GIB),))
    small = with_options(config, {"critic.n_gpus_per_node": 1})
    found = estimate(small, setting("Qwen2.5-7B", here))
    (short,) = [s for s in found.shortages(small, full, REFUSE_ABOVE) if s.memory is Memory.CRITIC]
    assert hint(short, found).startswith("more critic.n_gpus_per_node")
    assert "critic's GPU needs about" in shortage_line(short, found)


def test_on_cpu_actor_and_critic_hold_their_needs_at_the_same_time() -> None:
    """With processes of its own, the critic's backward is beside the actor's, not after it."""
    here, config = machine(8, 79, 1024), run(1, "gae")
    shape = shape_of("Qwen2.5-0.5B")
    shared, apart = (
        estimate(
            with_options(config, {"critic.n_gpus_per_node": own}),
            Setting(shape, shape, False, here, "float32"),
        )
        for own in (None, 1)
    )
    at = [
        found.total(Memory.HOST, Phase.UPDATE_CRITIC, with_guesses=False)
        for found in (shared, apart)
    ]
    assert at[0] == at[1]
    for phase in (Phase.UPDATE_ACTOR, Phase.LOG_PROBS):
        totals = [f.total(Memory.HOST, phase, with_guesses=False) for f in (shared, apart)]
        assert totals[1] > totals[0]


def test_an_engine_that_finds_less_than_its_share_is_found() -> None:
    """As vLLM itself would refuse to start: what is free of its card decides, to the byte."""
    here, config = machine(8, 80, 1024), run(4)
    config.trainer.rollout_gpus = 4
    config.actor_rollout_ref.rollout.gpu_memory_utilization = 0.75
    found = estimate(config, setting("Qwen2.5-7B", here))
    needed = found.peak_bytes(Memory.ENGINE)
    tight = Machine(here.host, here.shared_free, (DeviceMemory(80 * GIB, needed - 1),))
    exact = Machine(here.host, here.shared_free, (DeviceMemory(80 * GIB, needed),))
    shorts = [s for s in found.shortages(config, tight, REFUSE_ABOVE) if s.memory is Memory.ENGINE]
    assert [hint(short, found) for short in shorts] == ["a smaller rollout.gpu_memory_utilization"]
    assert "engine's GPU needs about 64.4 GB in loading" in shortage_line(shorts[0], found)
    assert not any(s.memory is Memory.ENGINE for s in found.shortages(config, exact, REFUSE_ABOVE))


def test_the_table_adds_up() -> None:
    """The lines of a place sum to its total, and the phase of the peak is named."""
    here, config = machine(8, 79, 1024), run(8)
    found = estimate(config, setting("Qwen2.5-7B", here))
    lines = table(found, here).splitlines()
    device = [line.split() for line in lines if line.startswith("  each GPU")]
    parts = [float(words[2]) for words in device[:-2]]
    assert sum(parts) == pytest.approx(float(device[-2][2]), abs=0.2)
    assert lines[len(device) - 2].endswith(f"of 84.8 GB free, in {found.peak_phase(Memory.DEVICE)}")


def test_amounts_read_well() -> None:
    """Three digits."""
    assert [format_bytes(n) for n in (5e6, 0.5e9, 2e9, 61.25e9)] == [
        "5 MB",
        "0.5 GB",
        "2 GB",
        "61.2 GB",
    ]


def test_the_hosts_limit_counts() -> None:
    """Offloading to a host without room is refused for the host's sake."""
    here = machine(8, 79, 1024)
    config = with_options(run(8), {"actor_rollout_ref.actor.fsdp_config.param_offload": True})
    tight = Machine(HostMemory(64 * GIB, 64 * GIB), here.shared_free, here.devices)
    found = estimate(config, setting("Qwen2.5-7B", here))
    (short,) = found.shortages(config, tight, REFUSE_ABOVE)
    assert short.memory is Memory.HOST


@pytest.mark.parametrize("on_gpu", [True, False])
def test_an_engine_that_is_not_vllm_takes_no_share(on_gpu: bool) -> None:
    """It has the weights and one dialogue's cache, 2 x 28 layers x 4 heads x 128 values a token;
    a server elsewhere has nothing here."""
    here, config = machine(1, 79, 1024), run(1)
    config.actor_rollout_ref.rollout.gpu_memory_utilization = 0.1  # too little for vLLM
    given = replace(setting("Qwen2.5-7B", here), on_gpu=on_gpu)
    found = {}
    for name in ("remote", "transformers", "own.py:Engine"):
        config.actor_rollout_ref.rollout.name = name
        found[name] = estimate(config, given)
        needs = [need for need in found[name].needs if need.name.startswith("engine")]
        size = 2 * (given.policy.parameters() + 4596 * 2 * 28 * 4 * 128)
        assert [need.bytes for need in needs] == ([] if name == "remote" else [size])
        assert found[name].engine is None
    assert not any("KV" in short.cause for short in found["transformers"].shortages(
        config, here, REFUSE_ABOVE))  # fmt: skip
