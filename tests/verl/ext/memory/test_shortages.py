"""Memory that is too small is reported with options that need less."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.verl.ext.memory.shapes import shape_of
from tests.verl.ext.memory.test_presets import machine
from verl.config import Config
from verl.ext.memory.check import hint, shortage_line, table
from verl.ext.memory.estimate import REFUSE_ABOVE, WARN_ABOVE, Setting, estimate
from verl.ext.memory.needs import Memory, Phase
from verl.machine import DeviceMemory, HostMemory, Machine, format_bytes
from verl.preflight.undecided import with_options

GIB = 1 << 30


def run(gpus: int, estimator: str = "grpo") -> Config:
    """Return a run without adapters on `gpus` GPUs, with token budgets that are set."""
    config = Config()
    config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu = 16384
    config.critic.ppo_max_token_len_per_gpu = 32768
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
    """A container's 64 MB of /dev/shm cannot hold the weights; other memories are large enough."""
    here, config = machine(8, 79, 1024), run(8)
    small = Machine(here.host, 64 << 20, here.devices)
    estimated = estimate(config, setting("Qwen2.5-0.5B", here))
    (short,) = estimated.shortages(config, small, REFUSE_ABOVE)
    assert short.memory is Memory.SHARED
    assert "/dev/shm needs about 1.98 GB" in shortage_line(short, estimated)


def test_an_engine_without_room_for_one_dialogue_is_found() -> None:
    """Its weights fill its share: vLLM would refuse to start."""
    here, config = machine(1, 79, 1024), run(1)
    config.actor_rollout_ref.model.lora_rank = 8
    config.actor_rollout_ref.rollout.gpu_memory_utilization = 0.2
    estimated = estimate(config, setting("Qwen2.5-7B", here))
    (short,) = estimated.shortages(config, here, REFUSE_ABOVE)
    assert "KV cache for one trajectory of 4596 tokens" in shortage_line(short, estimated)


def test_a_separate_engine_needs_nothing_on_a_ranks_card() -> None:
    """A rank's card has only the rank's needs, an engine's its share, awake or not.

    The oracle for a rank is a run whose engine shares its card, without the engine's needs.
    """
    here, config = machine(8, 79, 1024), run(4)
    config.actor_rollout_ref.rollout.gpu_memory_utilization = 0.9
    config.trainer.device = "cuda"
    config.actor_rollout_ref.model.lora_rank = 8
    shared_cards = estimate(config, setting("Qwen2.5-7B", here))
    config.trainer.rollout_gpus = 4
    alone = estimate(config, setting("Qwen2.5-7B", here))
    assert (
        alone.shortages(config, here, WARN_ABOVE)
        == []
        != shared_cards.shortages(config, here, WARN_ABOVE)
    )
    for phase in Phase:
        rank = [
            n
            for n in shared_cards.needs_in(Memory.DEVICE, phase)
            if not n.name.startswith("engine, ")
        ]
        assert alone.needs_in(Memory.DEVICE, phase) == rank
        assert alone.total(Memory.ENGINE, phase) == int(0.9 * here.devices[0].total)
    gone = "sleeping engines' weights"
    assert gone in {need.name for need in shared_cards.needs} - {need.name for need in alone.needs}
    lines = table(alone, here).splitlines()
    assert any(line.startswith("  engine's GPU") and "KV cache" in line for line in lines)


def test_a_separate_critic_needs_nothing_on_the_actors_cards() -> None:
    """The actor's card has the needs of a run without critic, and the critic's card its own needs.

    The oracle is PPO on shared cards, which have the needs of both.
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
    estimated = estimate(small, setting("Qwen2.5-7B", here))
    (short,) = [
        s for s in estimated.shortages(small, full, REFUSE_ABOVE) if s.memory is Memory.CRITIC
    ]
    assert hint(short, estimated).startswith("more critic.n_gpus_per_node")
    assert "critic's GPU needs about" in shortage_line(short, estimated)


def test_on_cpu_actor_and_critic_hold_their_needs_at_the_same_time() -> None:
    """With separate processes, the critic's backward overlaps with the actor's."""
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
        estimated.total(Memory.HOST, Phase.UPDATE_CRITIC, with_guesses=False)
        for estimated in (shared, apart)
    ]
    assert at[0] == at[1]
    for phase in (Phase.UPDATE_ACTOR, Phase.LOG_PROBS):
        totals = [f.total(Memory.HOST, phase, with_guesses=False) for f in (shared, apart)]
        assert totals[1] > totals[0]


def test_an_engine_with_less_than_its_share_is_found() -> None:
    """vLLM itself would refuse to start: the free memory of its card decides, to the byte."""
    here, config = machine(8, 80, 1024), run(4)
    config.trainer.rollout_gpus = 4
    config.actor_rollout_ref.rollout.gpu_memory_utilization = 0.75
    estimated = estimate(config, setting("Qwen2.5-7B", here))
    needed = estimated.peak_bytes(Memory.ENGINE)
    tight = Machine(here.host, here.shared_free, (DeviceMemory(80 * GIB, needed - 1),))
    exact = Machine(here.host, here.shared_free, (DeviceMemory(80 * GIB, needed),))
    shorts = [
        s for s in estimated.shortages(config, tight, REFUSE_ABOVE) if s.memory is Memory.ENGINE
    ]
    assert [hint(short, estimated) for short in shorts] == [
        "a smaller rollout.gpu_memory_utilization"
    ]
    assert "engine's GPU needs about 64.4 GB in loading" in shortage_line(shorts[0], estimated)
    assert not any(
        s.memory is Memory.ENGINE for s in estimated.shortages(config, exact, REFUSE_ABOVE)
    )


def test_the_table_adds_up() -> None:
    """The lines of a memory sum up to its total, and the peak phase is named."""
    here, config = machine(8, 79, 1024), run(8)
    estimated = estimate(config, setting("Qwen2.5-7B", here))
    lines = table(estimated, here).splitlines()
    device = [line.split() for line in lines if line.startswith("  each GPU")]
    parts = [float(words[2]) for words in device[:-2]]
    assert sum(parts) == pytest.approx(float(device[-2][2]), abs=0.2)
    assert lines[len(device) - 2].endswith(
        f"of 84.8 GB free, in {estimated.peak_phase(Memory.DEVICE)}"
    )


def test_sizes_are_formatted_for_people() -> None:
    """With three digits."""
    assert [format_bytes(n) for n in (5e6, 0.5e9, 2e9, 61.25e9)] == [
        "5 MB",
        "0.5 GB",
        "2 GB",
        "61.2 GB",
    ]


def test_the_hosts_limit_counts() -> None:
    """Offloading to a host with too little memory is refused."""
    here = machine(8, 79, 1024)
    config = with_options(run(8), {"actor_rollout_ref.actor.fsdp_config.param_offload": True})
    tight = Machine(HostMemory(64 * GIB, 64 * GIB), here.shared_free, here.devices)
    estimated = estimate(config, setting("Qwen2.5-7B", here))
    (short,) = estimated.shortages(config, tight, REFUSE_ABOVE)
    assert short.memory is Memory.HOST


@pytest.mark.parametrize("on_gpu", [True, False])
def test_an_engine_other_than_vllm_takes_no_share(on_gpu: bool) -> None:
    """Another engine than vLLM needs its weights and a cache; a server needs nothing.

    The cache is a dialogue's for each that is decoded at once, up to the cache's 2 GiB: 2 x 28
    layers x 4 heads x 128 values per token. The server is external.
    """
    here, config = machine(1, 79, 1024), run(1)
    config.actor_rollout_ref.rollout.gpu_memory_utilization = 0.1  # too little for vLLM
    given = replace(setting("Qwen2.5-7B", here), on_gpu=on_gpu)
    config.actor_rollout_ref.rollout.max_num_seqs, estimated = 1, {}
    for name in ("remote", "transformers"):
        config.actor_rollout_ref.rollout.name = name
        estimated[name] = estimate(config, given)
        needs = [need for need in estimated[name].needs if need.name.startswith("engine")]
        size = 2 * (given.policy.parameters() + 4596 * 2 * 28 * 4 * 128)
        assert [need.bytes for need in needs] == ([] if name == "remote" else [size])
        config.actor_rollout_ref.rollout.max_num_seqs = 64
        more = [x for x in estimate(config, given).needs if x.name.startswith("engine")]
        filled = 2 * given.policy.parameters() + 2 * 2**30
        assert [need.bytes for need in more] == ([] if name == "remote" else [filled])
        config.actor_rollout_ref.rollout.max_num_seqs = 1
        assert estimated[name].engine is None
    assert not any("KV" in short.cause for short in estimated["transformers"].shortages(
        config, here, REFUSE_ABOVE))  # fmt: skip
