"""The estimate sums up the needs of a run by phase, and follows the options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.verl.ext.memory.shapes import shape_of
from tests.verl.ext.memory.test_presets import machine
from verl.config import Config
from verl.ext.memory.estimate import Estimate, Setting, estimate
from verl.ext.memory.needs import (
    CPU_HEAP,
    GAPS,
    SAMPLING_COPIES,
    Memory,
    Phase,
    kv_bytes,
    pinned_bytes,
)
from verl.preflight.undecided import with_options

GIB = 1 << 30
ACTOR, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
MODEL, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
KWARGS = f"{ROLLOUT}.engine_kwargs"


def options(**changes: Any) -> Config:
    """Return PPO on 8 GPUs; `changes` are options with `__` for dots."""
    config = Config()
    config.actor_rollout_ref.model.path = "m"
    return with_options(config, {key.replace("__", "."): value for key, value in changes.items()})


def of(config: Config, size: str = "Qwen2.5-7B", on_gpu: bool = True) -> Estimate:
    shape = shape_of(size)
    dtype = "bfloat16" if on_gpu else "float32"
    return estimate(config, Setting(shape, shape, on_gpu, machine(8, 80, 1000), dtype))


def held(estimated: Estimate, what: str, memory: Memory) -> int:
    return sum(n.bytes for n in estimated.needs if n.name == what and n.memory is memory)


def test_full_training_holds_sixteen_bytes_a_parameter() -> None:
    """Float32 master weights, gradient and two moments, sharded over the ranks."""
    parameters = shape_of("Qwen2.5-7B").parameters()
    for ranks in (1, 2, 8):
        estimated = of(options(trainer__n_gpus_per_node=ranks))
        parts = [
            held(estimated, f"actor: {x}", Memory.DEVICE)
            for x in ("weights", "gradients", "moments")
        ]
        assert parts == [
            4 * (parameters // ranks),
            4 * (parameters // ranks),
            8 * (parameters // ranks),
        ]


def test_a_reference_has_only_weights_and_needs_kl() -> None:
    """It has neither gradient nor moments, and exists only if KL is used."""
    estimated = of(options())
    assert (
        held(estimated, "reference: weights", Memory.DEVICE)
        == 4 * shape_of("Qwen2.5-7B").parameters() // 8
    )
    assert held(estimated, "reference: moments", Memory.DEVICE) == 0
    assert (
        held(of(options(algorithm__kl_ctrl__kl_coef=0.0)), "reference: weights", Memory.DEVICE) == 0
    )


def test_an_adapter_shares_one_base() -> None:
    """Policy, reference and critic share one frozen bfloat16 model; few values are trained."""
    shape = shape_of("Qwen2.5-7B")
    estimated = of(options(**{f"{MODEL}.lora_rank": 64, "critic__model__lora_rank": 64}))
    trained = 2 * shape.adapter(64) + shape.hidden
    weights = held(estimated, "actor: weights", Memory.DEVICE)
    assert weights == 2 * shape.parameters() // 8 + 4 * (trained // 8)
    assert held(estimated, "actor: moments", Memory.DEVICE) == 8 * (trained // 8)
    assert not [n for n in estimated.needs if n.name.startswith(("reference", "critic"))]


def test_offloading_moves_memory_to_the_host() -> None:
    """Memory freed on the device is needed on the host, rounded up if pinned."""
    plain, config = of(options()), options(**{f"{ACTOR}.fsdp_config.param_offload": True})
    moved = of(config)
    for what in ("weights", "moments"):
        gone = held(plain, f"actor: {what}", Memory.DEVICE)
        assert held(moved, f"actor: {what}", Memory.DEVICE) == 0
        assert 8 * gone <= held(moved, f"actor: {what}", Memory.HOST) <= 16 * gone
    between = of(options(**{f"{ACTOR}.fsdp_config.optimizer_offload": True}))
    size = held(plain, "actor: moments", Memory.DEVICE)
    phases = {p: between.total(Memory.DEVICE, p) - plain.total(Memory.DEVICE, p) for p in Phase}
    assert phases[Phase.GENERATE] == phases[Phase.UPDATE_ACTOR] == -size
    assert phases[Phase.STEP_ACTOR] == 0


def test_the_peak_is_the_worst_phase_not_the_sum() -> None:
    """Engine and activations are never needed at the same time."""
    estimated = of(options())
    totals = [estimated.total(Memory.DEVICE, phase) for phase in Phase]
    everything = sum(n.bytes for n in estimated.needs if n.memory is Memory.DEVICE)
    assert estimated.peak_bytes(Memory.DEVICE) == max(totals) < everything
    names = {n.name for n in estimated.needs_in(Memory.DEVICE, Phase.UPDATE_ACTOR)}
    assert "activations and logits" in names and "engine, awake" not in names
    names = {n.name for n in estimated.needs_in(Memory.DEVICE, Phase.GENERATE)}
    assert "activations and logits" not in names and "engine, awake" in names


def test_the_engine_takes_its_share_and_caches_in_the_rest() -> None:
    """A key and a value of 4 heads of 128 in 28 layers, 2 bytes each: 57,344 bytes per token."""
    assert kv_bytes(shape_of("Qwen2.5-7B"), 2) == 57344
    small, large = (of(options(**{f"{ROLLOUT}.gpu_memory_utilization": u})) for u in (0.5, 0.6))
    assert held(small, "engine, awake", Memory.DEVICE) == 40 * GIB
    assert small.engine is not None and large.engine is not None
    assert large.engine.cached_tokens - small.engine.cached_tokens == pytest.approx(
        8 * GIB / 57344, abs=1
    )


def test_eight_bits_leave_the_engine_more_memory() -> None:
    """Each matrix value in the blocks, and each key and value, takes one byte instead of two.

    By the model's config, the blocks have 6.53 of its 7 billion values.
    """
    plain, rounded, cached = (
        of(options(**given)).engine
        for given in ({}, {KWARGS: {"quantization": "fp8"}}, {KWARGS: {"kv_cache_dtype": "fp8"}})
    )
    assert plain is not None and rounded is not None and cached is not None
    layer = 3584 * (3584 + 2 * 512 + 3584) + 3 * 3584 * 18944
    assert plain.weights - rounded.weights == 28 * layer
    assert (plain.per_token, cached.per_token) == (57344, 28672)


@pytest.mark.parametrize(
    ("key", "less", "more"),
    [
        (f"{ACTOR}.ppo_max_token_len_per_gpu", 8192, 16384),
        (f"{MODEL}.enable_gradient_checkpointing", True, False),
        ("trainer.n_gpus_per_node", 8, 4),
        ("trainer.nnodes", 2, 1),
    ],
)
def test_options_change_the_estimate_in_the_right_direction(key: str, less: Any, more: Any) -> None:
    """For each option that changes the memory of the update."""
    amounts = [
        of(options(**{key: x})).total(Memory.DEVICE, Phase.UPDATE_ACTOR) for x in (less, more)
    ]
    assert amounts[0] < amounts[1]


def test_sampling_ahead_keeps_the_previous_weights_in_shared_memory() -> None:
    """A whole version: engines may still read it while the next one is written."""
    of_turns, ahead = (of(options(**{f"{ROLLOUT}.max_staleness": k})) for k in (0, 1))
    size = held(of_turns, "weights for the engines", Memory.SHARED)
    assert held(ahead, "previous version of the weights", Memory.SHARED) == size
    assert ahead.total(Memory.SHARED, Phase.UPDATE_ACTOR) == 2 * size
    assert of_turns.total(Memory.SHARED, Phase.UPDATE_ACTOR) == size


def test_loading_needs_no_memory_of_its_own() -> None:
    """Ranks only read the rows they keep: the node's peak is never the loading phase."""
    for ranks in (1, 4):
        estimated = of(options(algorithm__adv_estimator="grpo", trainer__n_gpus_per_node=ranks))
        held_after = estimated.total(Memory.HOST, Phase.UPDATE_ACTOR)
        assert estimated.total(Memory.HOST, Phase.LOAD) <= held_after


def test_on_cpu_everything_is_on_the_host() -> None:
    """No need names a device; ranks multiply the needs; the KV cache has its given size."""
    config = options(**{"trainer.n_gpus_per_node": 2, f"{ROLLOUT}.cpu_kv_cache_gib": 3})
    estimated = of(config, "Qwen2.5-0.5B", on_gpu=False)
    assert estimated.peak_bytes(Memory.DEVICE) == 0 and estimated.engine is None
    parameters = shape_of("Qwen2.5-0.5B").parameters()
    assert held(estimated, "actor: weights", Memory.HOST) == 2 * 4 * (parameters // 2)
    assert held(estimated, "engines: KV cache", Memory.HOST) == 3 * GIB
    gradients = held(estimated, "actor: gradients", Memory.HOST)
    assert gradients == int(CPU_HEAP * 2 * 4 * (parameters // 2))


def test_a_sleeping_engine_keeps_only_the_base_of_an_adapter_on_the_host() -> None:
    """Whole weights are dropped in sleep: new ones arrive before the next request."""
    what, shape = "sleeping engines' weights", shape_of("Qwen2.5-7B")
    assert held(of(options()), what, Memory.HOST) == 0
    kept, merged = (
        of(options(**{f"{MODEL}.lora_rank": 64, f"{ROLLOUT}.merge_adapter": is_merged}))
        for is_merged in (False, True)
    )
    assert held(kept, what, Memory.HOST) >= 8 * 2 * shape.parameters()
    assert held(merged, what, Memory.HOST) == 0


def test_the_estimate_counts_the_dialogues_that_the_engine_decodes() -> None:
    """The derived number and the same explicit number need the same; half of it needs less."""
    derived = of(options(**{f"{ROLLOUT}.n_agent": 5})).engine
    typed = of(options(**{f"{ROLLOUT}.n_agent": 5, f"{ROLLOUT}.max_num_seqs": 320})).engine
    fewer = of(options(**{f"{ROLLOUT}.n_agent": 5, f"{ROLLOUT}.max_num_seqs": 160})).engine
    assert derived is not None and fewer is not None
    assert derived == typed
    vocabulary = shape_of("Qwen2.5-7B").vocab
    assert derived.working - fewer.working == SAMPLING_COPIES * 4 * 160 * vocabulary


def test_an_engine_in_float16_has_two_bytes_per_value() -> None:
    """float16 needs as much memory as bfloat16, whatever dtype the ranks use."""
    half, brain = (of(options(**{f"{ROLLOUT}.dtype": d})).engine for d in ("float16", "bfloat16"))
    assert half == brain


def test_pinned_shards_are_rounded_one_by_one() -> None:
    """Three shards of 7 values of 4 bytes are 16 bytes each: 12 bytes, rounded up."""
    assert pinned_bytes([7], 4, shards=3) == 16
    assert pinned_bytes([7, 7], 4, shards=3) == 32


@pytest.mark.parametrize("on_gpu", [True, False])
def test_external_servers_need_no_memory_here(on_gpu: bool) -> None:
    """Neither on devices nor on the host; with `weights_dir`, not in /dev/shm either."""
    usual = {f"{ROLLOUT}.url": ["http://a:1"]}
    own, theirs = of(options(), on_gpu=on_gpu), of(with_options(options(), usual), on_gpu=on_gpu)
    assert theirs.engine is None and not [n for n in theirs.needs if n.name.startswith("engine")]
    assert theirs.peak_bytes(Memory.HOST) < own.peak_bytes(Memory.HOST)
    assert held(theirs, "weights for the engines", Memory.SHARED)
    elsewhere = with_options(options(), {**usual, f"{ROLLOUT}.server": {"weights_dir": "/shared"}})
    assert of(elsewhere, on_gpu=on_gpu).peak_bytes(Memory.SHARED) == 0


@pytest.mark.parametrize("on_gpu", [True, False])
def test_gaps_between_tensors_count_where_segments_do_not_expand(on_gpu: bool) -> None:
    """A pass needs a third more then, on a GPU; the CPU's heap has a factor of its own."""
    config, shape = options(), shape_of("Qwen2.5-0.5B")
    setting = Setting(shape, shape, on_gpu, machine(8, 80, 1000))
    without, with_gaps = (
        estimate(config, replace(setting, has_gaps=has_gaps)) for has_gaps in (False, True)
    )
    memory = Memory.DEVICE if on_gpu else Memory.HOST
    extra = with_gaps.total(memory, Phase.UPDATE_ACTOR) - without.total(memory, Phase.UPDATE_ACTOR)
    [passes] = [
        need.bytes for need in without.needs_in(memory, Phase.UPDATE_ACTOR)
        if need.name == "activations and logits"
    ]  # fmt: skip
    assert extra == (int(GAPS * passes) if on_gpu else 0)
