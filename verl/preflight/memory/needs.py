"""What ranks and engines hold, when and where, and the constants that nobody can compute.

Constants are round numbers for things outside our tensors (contexts, libraries, processes); those
of the CPU were measured, those of the GPU are read from published logs (docs/memory.md).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from verl.config import Config, FsdpConfig
from verl.config.policy import VLLM_LORA_RANKS, BlocksConfig
from verl.core_algos.advantages import ADVANTAGES
from verl.model_shape import ModelShape
from verl.preflight.memory.trial import Pass, activation_bytes
from verl.rollout.interface import engine_takes_adapter
from verl.rollout.vllm_engine import batched_tokens
from verl.training.budgets import TokenBudgets, actor_budgets, critic_budgets

FLOAT = 4
"""Bytes of a float32 value: master weights, gradients, moments."""
GIB, MIB = 1 << 30, 1 << 20


class Phase(enum.StrEnum):
    """What a run is doing; everything that is held in a phase is needed at once."""

    LOAD = "loading"
    GENERATE = "generation"
    LOG_PROBS = "log-probs"
    REF_LOG_PROBS = "reference log-probs"
    VALUES = "values"
    UPDATE_CRITIC = "critic's backward"
    STEP_CRITIC = "critic's optimizer step"
    UPDATE_ACTOR = "actor's backward"
    STEP_ACTOR = "actor's optimizer step"
    SYNC = "weights to the engines"


class Memory(enum.StrEnum):
    """Which memory is held."""

    DEVICE = "each GPU"
    """Of a rank, which an engine may share."""
    ENGINE = "engine's GPU"
    """Of an engine alone (`trainer.rollout_gpus`)."""
    CRITIC = "critic's GPU"
    """Of a rank of the critic alone (`critic.n_gpus_per_node`)."""
    HOST = "host"
    """Of one node, all its processes together; every byte of a run on CPU."""
    SHARED = "/dev/shm"
    """Files of one node; they are part of the host's memory too."""


ALWAYS = frozenset(Phase)
CONCURRENT_PHASES = {
    Phase.VALUES: {Phase.LOG_PROBS, Phase.REF_LOG_PROBS},
    Phase.UPDATE_CRITIC: {Phase.UPDATE_ACTOR, Phase.STEP_ACTOR},
    Phase.STEP_CRITIC: {Phase.UPDATE_ACTOR, Phase.STEP_ACTOR},
}
"""Phases of the actor in which a critic on devices of its own may be in one of its own."""
AWAKE = frozenset({Phase.GENERATE, Phase.SYNC})
"""Phases in which engines hold their share of the devices."""
ASLEEP = ALWAYS - AWAKE
LOADED = ALWAYS - {Phase.LOAD}


@dataclass(frozen=True)
class Need:
    """Memory that one thing holds, in some phases."""

    memory: Memory
    name: str
    bytes: int
    phases: frozenset[Phase] = ALWAYS
    is_guess: bool = False
    """A constant for processes, which no refusal rests on."""


PROCESSES = {"cpu": (600 * MIB, 1500 * MIB, 1500 * MIB), "gpu": (2 * GIB, 4 * GIB, 2 * GIB)}
"""Host bytes before anything is loaded: of a training rank (Python, torch, transformers), of an
engine's processes, of the driver with Ray's own processes."""
CPU_HEAP = 1.6
"""What tensors that come and go take, relative to their size: memory that malloc keeps in pieces
(`cpu_env` in verl.trainer.groups has it keep what was touched)."""
CONTEXT = GIB
"""Of a device, by a training rank: CUDA context, cuBLAS workspace, communication buffers."""
ENGINE_ASLEEP = 2 * GIB
"""Of a device, by a sleeping engine: its context and captured graphs stay."""
ENGINE_OTHER = 2 * GIB
"""Of a device, by an engine awake, beside weights, activations and KV cache."""


def pinned(numels: Sequence[int], item: int, shards: int = 1) -> int:
    """Pinned host bytes of tensors of `numels` values of `item` bytes, cut into `shards`.

    torch rounds each up to a power of two: PowerOf2Ceil in ATen/core/CachingHostAllocator.h.
    """
    return sum(1 << (-(-numel // shards) * item - 1).bit_length() for numel in numels)


MOMENTS = 2
"""AdamW's tensors for each learned value, float32."""


@dataclass(frozen=True)
class HeldModel:
    """One set of sharded weights on the ranks."""

    name: str
    shape: ModelShape
    has_head: bool
    frozen: int
    """Bytes of what is not trained, over all ranks."""
    learned: int
    """Values that are trained, over all ranks."""
    offload: FsdpConfig
    forward: frozenset[Phase]
    """Phases in which it computes, the backward's included."""
    update: Phase | None = None
    """In which gradients are made."""
    step: Phase | None = None
    """In which the optimizer uses them."""
    memory: Memory = Memory.DEVICE
    """Whose devices it is on: the actor's, or the critic's own."""


def has_critic(config: Config) -> bool:
    """Whether the ranks hold a critic too."""
    return ADVANTAGES[config.algorithm.adv_estimator].needs_critic


def held_models(
    config: Config, policy: ModelShape, critic: ModelShape, item: int
) -> list[HeldModel]:
    """The weights that a rank has a shard of; `item` is the compute dtype's bytes.

    As `verl.training.worker` builds them: below an adapter the base is in the compute dtype,
    the reference is that base, and a critic with an adapter shares it; all else is float32.
    """
    section, own = config.actor_rollout_ref, config.critic.model
    model, forward = section.model, {Phase.LOG_PROBS, Phase.UPDATE_ACTOR}
    critics = frozenset({Phase.VALUES, Phase.UPDATE_CRITIC})
    head = critic.adapter(own.lora_rank, own.target_modules) + critic.hidden
    frozen, learned = 0, policy.parameters()
    if model.has_adapter:
        forward |= {Phase.REF_LOG_PROBS, *critics}
        frozen = item * policy.parameters()
        learned = policy.adapter(model.lora_rank, model.target_modules)
        learned += head if has_critic(config) and config.shares_base else 0
    found = [
        HeldModel("actor", policy, True, frozen, learned, section.actor.fsdp_config,
                  frozenset(forward), Phase.UPDATE_ACTOR, Phase.STEP_ACTOR)
    ]  # fmt: skip
    if config.needs_reference and not model.has_adapter:
        found.append(
            HeldModel("reference", policy, True, FLOAT * policy.parameters(), 0,
                      section.ref.fsdp_config, frozenset({Phase.REF_LOG_PROBS}))
        )  # fmt: skip
    if has_critic(config) and not config.shares_base:
        adapted = own.has_adapter
        frozen = item * critic.parameters() if adapted else 0
        learned = head if adapted else critic.parameters(with_head=False) + critic.hidden
        found.append(
            HeldModel("critic", critic, adapted, frozen, learned, own.fsdp_config, critics,
                      Phase.UPDATE_CRITIC, Phase.STEP_CRITIC,
                      Memory.CRITIC if config.has_own_critic else Memory.DEVICE)
        )  # fmt: skip
    return found


def shard_needs(model: HeldModel, num_ranks: int, local: int) -> Iterator[Need]:
    """A rank's shard of weights, gradients and moments; `local` ranks share a host.

    FSDP2 keeps what is trained in float32, gradients too; a gradient exists from the first
    micro-batch to the end of the optimizer's step. With `param_offload` all of it is on the host,
    with `optimizer_offload` the moments between steps; what is copied from there is pinned.
    """
    learned = model.learned // num_ranks
    weights, gradients = FLOAT * learned + model.frozen // num_ranks, FLOAT * learned
    moments = MOMENTS * FLOAT * learned
    numels = model.shape.tensors(model.has_head)
    on_host = local * pinned(numels, FLOAT, num_ranks) * num_ranks / (FLOAT * sum(numels))
    if model.offload.param_offload:
        held = {"weights": weights * on_host}
        if learned:
            held |= {"gradients": gradients * on_host, "moments": moments * local}
        for what, size in held.items():
            yield Need(Memory.HOST, f"{model.name}: {what}", int(size))
        return
    yield Need(model.memory, f"{model.name}: weights", weights)
    if learned and model.step is not None:
        between = model.offload.optimizer_offload
        phases = frozenset({model.step}) if between else ALWAYS
        both = frozenset(filter(None, (model.update, model.step)))
        yield Need(model.memory, f"{model.name}: gradients", gradients, both)
        yield Need(model.memory, f"{model.name}: moments", moments, phases)
        if between:
            yield Need(Memory.HOST, f"{model.name}: moments", int(moments * on_host))


def gathered_needs(model: HeldModel, num_ranks: int, item: int) -> Iterator[Need]:
    """What FSDP2 gathers in the compute dtype, and gradients before they are spread.

    Embedding, head and last norm are one group that stays from forward to backward; of the blocks
    up to three exist at once (the one that computes, the next one's communication buffer, the last
    one's that is being freed). One rank alone keeps every block to the end of the backward. A
    block's gradient exists in the compute dtype and, while it is reduced, twice in float32. Without
    `reshard_each` all blocks stay, and float32 gradients whole, from micro-batch to micro-batch.
    """
    root, block, layers = model.shape.root(model.has_head), model.shape.block, model.shape.layers
    stays = num_ranks == 1 or not model.offload.reshard_each
    blocks = layers if stays else min(3, layers)
    size = item * (root + blocks * block)
    yield Need(model.memory, f"{model.name}: gathered", size, model.forward)
    if model.update is not None and not model.frozen:
        size, phases = (item + 2 * FLOAT) * block, frozenset({model.update})
        if num_ranks > 1 and not model.offload.reshard_each:
            size += FLOAT * model.learned
        yield Need(model.memory, f"{model.name}: gradients not yet spread", size, phases)


def activation_needs(
    config: Config, policy: ModelShape, critic: ModelShape, dtype: str
) -> Iterator[Need]:
    """Activations and logits of each pass, by its token budget."""
    section, own, longest = config.actor_rollout_ref, config.critic, config.data.max_model_len
    minis = section.actor.ppo_mini_batch_size

    def needs(work: Pass, budgets: TokenBudgets, minis: int, num_groups: int, model: BlocksConfig,
              reads: frozenset[Phase], update: Phase) -> Iterator[Need]:  # fmt: skip
        """The largest micro-batch holds the budget, or all there is, or one whole trajectory."""
        what = "activations" if work.is_critic else "activations and logits"
        memory = Memory.CRITIC if work.is_critic and config.has_own_critic else Memory.DEVICE
        recompute = model.enable_gradient_checkpointing or False
        for budget, number, phases, learns in (
            (budgets.inference, config.num_trajectories, reads, False),
            (budgets.update, minis, frozenset({update}), True),
        ):
            tokens = max(longest, min(budget, -(-number // num_groups) * longest))
            tried = replace(work, tokens=tokens, learns=learns, recompute=learns and recompute)
            yield Need(memory, what, activation_bytes(tried), phases)

    work = Pass(
        policy, longest, longest, dtype, lora_rank=section.model.lora_rank,
        temperature=section.rollout.temperature,
        sp_size=section.actor.ulysses_sequence_parallel_size,
    )  # fmt: skip
    reads = frozenset({Phase.LOG_PROBS, *[Phase.REF_LOG_PROBS] * config.needs_reference})
    yield from needs(work, actor_budgets(config), minis, config.num_sp_groups, section.model,
                     reads, Phase.UPDATE_ACTOR)  # fmt: skip
    if has_critic(config):
        work = Pass(critic, longest, longest, dtype, is_critic=True,
                    lora_rank=own.model.lora_rank, sp_size=config.critic_sp_size)  # fmt: skip
        yield from needs(work, critic_budgets(config), own.ppo_mini_batch_size or minis,
                         config.num_critic_sp_groups, own.model, frozenset({Phase.VALUES}),
                         Phase.UPDATE_CRITIC)  # fmt: skip


SAMPLING_COPIES = 3
"""Float32 copies of the logits of all decoded sequences: logits, their log-softmax, sorting."""


@dataclass(frozen=True)
class EngineMemory:
    """What one engine has on each of its devices, in bytes."""

    share: int
    """All it may take."""
    weights: int
    working: int
    """Activations of one batch of prompt tokens, logits of all decoded sequences, graphs."""
    per_token: int
    """KV cache of one token."""
    memory: Memory
    """Whose devices: the ranks', or its own."""

    @property
    def cache(self) -> int:
        """What is left for the KV cache; negative where not even the weights fit."""
        return self.share - self.weights - self.working

    @property
    def cached_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return max(0, self.cache) // self.per_token


def kv_bytes(shape: ModelShape, item: int, size: int = 1) -> int:
    """KV cache of one token on each of `size` devices: a key and a value head in every layer."""
    return 2 * shape.layers * max(1, shape.kv_heads // size) * shape.head_dim * item


def _working(shape: ModelShape, item: int, seqs: int, tokens: int, size: int = 1) -> int:
    """Activations of a step of `tokens`, and logits of `seqs` sequences."""
    activations = tokens * item * (2 * shape.hidden + 3 * shape.widest // size)
    return activations + SAMPLING_COPIES * FLOAT * seqs * shape.vocab


def engine_memory(config: Config, shape: ModelShape, item: int, device_bytes: int) -> EngineMemory:
    """An engine on GPUs of `device_bytes`; vLLM takes `gpu_memory_utilization` of all of it.

    It profiles a forward of its largest batch, and what is left of its share becomes KV cache.
    """
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    size, seqs = rollout.tensor_model_parallel_size, config.max_num_seqs(on_gpu=True)
    weights = item * shape.parameters()
    if rollout.quantization is not None:  # of each matrix in the blocks, one byte a value
        weights -= (item - 1) * shape.linear_weights
    weights //= size
    if engine_takes_adapter(config):
        reserved = next(rank for rank in VLLM_LORA_RANKS if rank >= model.lora_rank)
        weights += item * shape.adapter(reserved) // size
    return EngineMemory(
        share=int(rollout.gpu_memory_utilization * device_bytes),
        weights=weights,
        working=_working(shape, item, seqs, batched_tokens(seqs), size) + ENGINE_OTHER,
        per_token=kv_bytes(shape, 1 if rollout.kv_cache_dtype == "fp8" else item, size),
        memory=Memory.ENGINE if config.is_split else Memory.DEVICE,
    )


def gpu_engine_needs(config: Config, shape: ModelShape, item: int, share: int) -> Iterator[Need]:
    """An engine on GPUs: on the ranks' awake from generation on, asleep while ranks compute.

    Asleep, the KV cache is dropped, and so are whole weights (level 2): new ones come before the
    next request. Below an adapter they wait on the host in pinned memory (level 1).
    """
    if config.is_split:
        yield Need(Memory.ENGINE, "engine", share)
        return
    yield Need(Memory.DEVICE, "engine, awake", share, AWAKE)
    yield Need(Memory.DEVICE, "engine, asleep", ENGINE_ASLEEP, ASLEEP)
    if engine_takes_adapter(config):
        size = config.actor_rollout_ref.rollout.tensor_model_parallel_size
        waiting = config.trainer.n_gpus_per_node * pinned(shape.tensors(), item, size)
        yield Need(Memory.HOST, "engines' weights while they sleep", waiting)


def other_engine_needs(
    config: Config, shape: ModelShape, item: int, on_gpu: bool
) -> Iterator[Need]:
    """An engine that is not vLLM: weights, and the cache of one dialogue; more nobody can know."""
    if config.actor_rollout_ref.rollout.name == "remote":
        return
    size = item * shape.parameters() + config.data.max_model_len * kv_bytes(shape, item)
    if not on_gpu:
        count = -(-config.num_engines(on_gpu=False) // config.trainer.nnodes)
        yield Need(Memory.HOST, "engines", count * size)
    elif config.is_split:
        yield Need(Memory.ENGINE, "engine", size)
    else:
        yield Need(Memory.DEVICE, "engine, awake", size, AWAKE)


def cpu_engine_needs(config: Config, shape: ModelShape, item: int) -> Iterator[Need]:
    """Engines on CPU never sleep: weights, a KV cache of fixed size, one batch's activations."""
    count = -(-config.num_engines(on_gpu=False) // config.trainer.nnodes)
    seqs = config.max_num_seqs(on_gpu=False)
    working = _working(shape, item, seqs, batched_tokens(seqs, config.data.max_model_len))
    cache = config.actor_rollout_ref.rollout.cpu_kv_cache_gib << 30
    yield Need(Memory.HOST, "engines: weights", count * item * shape.parameters())
    yield Need(Memory.HOST, "engines: KV cache", count * cache)
    yield Need(Memory.HOST, "engines: activations", count * working)
