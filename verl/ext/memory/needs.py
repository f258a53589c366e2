"""Lists what ranks and engines hold in memory, in which phases, including constant overheads.

The constants are round numbers for memory outside our tensors (contexts, libraries, processes);
those for the CPU were measured, those for GPUs are from published logs (docs/guides/models.md).
"""

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from verl.config import Config, FsdpConfig
from verl.config.engine_kwargs import quantizes_cache, quantizes_weights
from verl.config.policy import VLLM_LORA_RANKS, BlocksConfig
from verl.ext.memory.trial import Pass, activation_bytes
from verl.ext.model_shape import ModelShape
from verl.preflight.undecided import shares_base
from verl.rollout.interface import chosen
from verl.rollout.vllm_settings import batched_tokens
from verl.training.budgets import TokenBudgets, actor_budgets, critic_budgets
from verl.training.devices import DTYPES
from verl.training.roles import has_critic

FLOAT = 4
"""Bytes of a float32 value: master weights, gradients, moments."""
GIB, MIB = 1 << 30, 1 << 20


class Phase(enum.StrEnum):
    """A phase of a run; everything held in a phase is needed at the same time."""

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
    """A kind of memory."""

    DEVICE = "each GPU"
    """GPU of a rank, which an engine may share."""
    ENGINE = "engine's GPU"
    """GPU of an engine only (`trainer.rollout_gpus`)."""
    CRITIC = "critic's GPU"
    """GPU of a critic rank only (`critic.n_gpus_per_node`)."""
    HOST = "host"
    """Host memory of one node, for all its processes; on CPU, all memory of a run."""
    SHARED = "/dev/shm"
    """Shared-memory files of one node, which count as host memory too."""


ALWAYS = frozenset(Phase)
CONCURRENT_PHASES = {
    Phase.VALUES: {Phase.LOG_PROBS, Phase.REF_LOG_PROBS},
    Phase.UPDATE_CRITIC: {Phase.UPDATE_ACTOR, Phase.STEP_ACTOR},
    Phase.STEP_CRITIC: {Phase.UPDATE_ACTOR, Phase.STEP_ACTOR},
}
"""Phases of the actor that a phase of a critic on separate devices may overlap."""
AWAKE = frozenset({Phase.GENERATE, Phase.SYNC})
"""Phases in which engines hold their share of the devices' memory."""
ASLEEP = ALWAYS - AWAKE
LOADED = ALWAYS - {Phase.LOAD}


@dataclass(frozen=True)
class Need:
    """Memory that one item holds in some phases."""

    memory: Memory
    name: str
    bytes: int
    phases: frozenset[Phase] = ALWAYS
    is_guess: bool = False
    """Whether it is a guessed constant for processes, for which no run is refused."""


PROCESSES = {"cpu": (600 * MIB, 1500 * MIB, 1500 * MIB), "gpu": (2 * GIB, 4 * GIB, 2 * GIB)}
"""Host bytes before anything is loaded: of a training rank (Python, torch, transformers), of an
engine's processes, of the driver with Ray's own processes."""
CPU_HEAP = 1.6
"""Heap used by temporary tensors relative to their size, due to fragmentation (`verl.malloc`
keeps freed memory)."""
GAPS = 0.35
"""Gaps of torch's usual segments relative to the tensors of a pass (benchmarks/fragmentation.py).
Expandable segments leave 2 %, which the limit above which a run is refused allows."""
CONTEXT = GIB
"""Device bytes of a training rank: CUDA context, cuBLAS workspace, communication buffers."""
ENGINE_ASLEEP = 2 * GIB
"""Device bytes of a sleeping engine: its context and captured graphs."""
ENGINE_OTHER = 2 * GIB
"""Device bytes of an awake engine in addition to weights, activations and KV cache."""


def pinned_bytes(numels: Sequence[int], item: int, shards: int = 1) -> int:
    """Return pinned host bytes of tensors of `numels` values of `item` bytes, split in `shards`.

    torch rounds each shard up to a power of two: PowerOf2Ceil in ATen/core/CachingHostAllocator.h.
    """
    return sum(1 << (-(-numel // shards) * item - 1).bit_length() for numel in numels)


MOMENTS = 2
"""AdamW's float32 values for each trained value."""


@dataclass(frozen=True)
class HeldModel:
    """One model whose weights are sharded over the ranks."""

    name: str
    shape: ModelShape
    has_head: bool
    frozen: int
    """Bytes of all weights that are not trained, over all ranks."""
    trained: int
    """Number of trained values, over all ranks."""
    fsdp: FsdpConfig
    forward: frozenset[Phase]
    """Phases in which the model computes, including the backward pass."""
    update: Phase | None = None
    """Phase in which gradients are computed."""
    step: Phase | None = None
    """Phase in which the optimizer uses the gradients."""
    memory: Memory = Memory.DEVICE
    """The devices that hold the model: the actor's, or the critic's own."""


def held_models(
    config: Config, policy: ModelShape, critic: ModelShape, item: int
) -> list[HeldModel]:
    """Return the models of which a rank holds a shard; `item`: bytes of the compute dtype.

    This mirrors `verl.training.worker`: with an adapter, the base is in the compute dtype and also
    serves as the reference, and a critic with an adapter shares it; everything else is float32.
    """
    section, critic_options = config.actor_rollout_ref, config.critic.model
    model = section.model
    critic_phases = frozenset({Phase.VALUES, Phase.UPDATE_CRITIC})
    critic_adapter = critic.adapter(critic_options.lora_rank, critic_options.target_modules)
    critic_adapter += critic.hidden  # and the value head
    forward = {Phase.LOG_PROBS, Phase.UPDATE_ACTOR}
    frozen, trained = 0, policy.parameters()
    if model.has_adapter:
        forward |= {Phase.REF_LOG_PROBS, *critic_phases}
        frozen = item * policy.parameters()
        trained = policy.adapter(model.lora_rank, model.target_modules)
        if has_critic(config) and shares_base(config):
            trained += critic_adapter
    models = [
        HeldModel("actor", policy, True, frozen, trained, section.actor.fsdp_config,
                  frozenset(forward), Phase.UPDATE_ACTOR, Phase.STEP_ACTOR)
    ]  # fmt: skip
    if config.needs_reference and not model.has_adapter:
        models.append(
            HeldModel("reference", policy, True, FLOAT * policy.parameters(), 0,
                      FsdpConfig(section.ref.fsdp_config.param_offload, False),
                      frozenset({Phase.REF_LOG_PROBS}))
        )  # fmt: skip
    if has_critic(config) and not shares_base(config):
        has_adapter = critic_options.has_adapter
        frozen = item * critic.parameters() if has_adapter else 0
        all_values = critic.parameters(with_head=False) + critic.hidden
        trained = critic_adapter if has_adapter else all_values
        models.append(
            HeldModel("critic", critic, has_adapter, frozen, trained, critic_options.fsdp_config,
                      critic_phases, Phase.UPDATE_CRITIC, Phase.STEP_CRITIC,
                      Memory.CRITIC if config.placement.is_apart("critic") else Memory.DEVICE)
        )  # fmt: skip
    return models


def shard_needs(model: HeldModel, num_ranks: int, local: int) -> Iterator[Need]:
    """Yield the needs of a rank's shard of weights, gradients and moments; `local` ranks per host.

    FSDP2 keeps trained weights and their gradients in float32; a gradient exists from the first
    micro-batch to the end of the optimizer's step. With `param_offload` all of it is on the host,
    with `optimizer_offload` the moments between steps; tensors that are copied to the device are in
    pinned memory.
    """
    trained = model.trained // num_ranks
    weights, gradients = FLOAT * trained + model.frozen // num_ranks, FLOAT * trained
    moments = MOMENTS * FLOAT * trained
    numels = model.shape.tensors(model.has_head)
    on_host = local * pinned_bytes(numels, FLOAT, num_ranks) * num_ranks / (FLOAT * sum(numels))
    if model.fsdp.param_offload:
        sizes = {"weights": weights * on_host}
        if trained:
            sizes |= {"gradients": gradients * on_host, "moments": moments * local}
        for kind, size in sizes.items():
            yield Need(Memory.HOST, f"{model.name}: {kind}", int(size))
        return
    yield Need(model.memory, f"{model.name}: weights", weights)
    if trained and model.step is not None:
        is_offloaded = model.fsdp.optimizer_offload
        moment_phases = frozenset({model.step}) if is_offloaded else ALWAYS
        gradient_phases = frozenset(filter(None, (model.update, model.step)))
        yield Need(model.memory, f"{model.name}: gradients", gradients, gradient_phases)
        yield Need(model.memory, f"{model.name}: moments", moments, moment_phases)
        if is_offloaded:
            yield Need(Memory.HOST, f"{model.name}: moments", int(moments * on_host))


def gathered_needs(model: HeldModel, num_ranks: int, item: int) -> Iterator[Need]:
    """Yield the needs of weights that FSDP2 gathers, and of gradients before they are reduced.

    Weights are gathered in the compute dtype. Embedding, head and last norm are one group, which
    stays from forward to backward; of the blocks up to three exist at once (the one that computes,
    the next one's communication buffer, and the previous one, which is being freed). A single rank
    keeps every block to the end of the backward. A block's gradient exists in the compute dtype
    and, while it is reduced, twice in float32. With `reshard_each=false` all gathered blocks and
    unsharded float32 gradients stay from micro-batch to micro-batch.
    """
    root, layers = model.shape.root(model.has_head), model.shape.layers
    block = model.shape.block_parameters
    keeps_blocks = num_ranks == 1 or not model.fsdp.reshard_each
    blocks = layers if keeps_blocks else min(MAX_GATHERED, layers)
    size = item * (root + blocks * block)
    yield Need(model.memory, f"{model.name}: gathered", size, model.forward)
    if model.update is not None and not model.frozen:
        size, phases = (item + 2 * FLOAT) * block, frozenset({model.update})
        if num_ranks > 1 and not model.fsdp.reshard_each:
            size += FLOAT * model.trained
        yield Need(model.memory, f"{model.name}: unreduced gradients", size, phases)


def activation_needs(
    config: Config, policy: ModelShape, critic: ModelShape, dtype: str
) -> Iterator[Need]:
    """Yield the needs of activations and logits of each pass, by its token budget."""
    section, own, longest = config.actor_rollout_ref, config.critic, config.data.max_model_len
    mini_batch, item = section.actor.ppo_mini_batch_size, DTYPES[dtype].itemsize

    def needs(base: Pass, budgets: TokenBudgets, mini_batch: int, num_ranks: int,
              model: BlocksConfig, reads: frozenset[Phase],
              update: Phase) -> Iterator[Need]:  # fmt: skip
        # The largest micro-batch: the budget's tokens, or all there are; at least one trajectory.
        name = "activations" if base.is_critic else "activations and logits"
        is_alone = base.is_critic and config.placement.is_apart("critic")
        memory = Memory.CRITIC if is_alone else Memory.DEVICE
        recompute = model.enable_gradient_checkpointing or False
        for budget, num_trajectories, phases, has_backward in (
            (budgets.inference, config.num_trajectories, reads, False),
            (budgets.update, mini_batch, frozenset({update}), True),
        ):
            own_trajectories = -(-num_trajectories * base.ranks_per_shard // num_ranks)
            tokens = max(longest, min(budget, own_trajectories * longest))
            work = replace(base, tokens=tokens, has_backward=has_backward,
                           recompute=has_backward and recompute)  # fmt: skip
            has_gradients = has_backward and not base.lora_rank
            first = first_gather_bytes(work, item, num_ranks, has_gradients)
            for phase in phases:
                # An adapter's reference is the base without it.
                is_base = phase is Phase.REF_LOG_PROBS
                size = activation_bytes(replace(work, lora_rank=0) if is_base else work)
                yield Need(memory, name, max(size, first), frozenset({phase}))

    plan = config.placement
    policy_pass = Pass(
        policy, longest, longest, dtype, lora_rank=section.model.lora_rank,
        temperature=section.rollout.temperature,
        ranks_per_shard=plan.actor.ranks_per_shard,
    )  # fmt: skip
    reads = frozenset({Phase.LOG_PROBS, *[Phase.REF_LOG_PROBS] * config.needs_reference})
    yield from needs(policy_pass, actor_budgets(config), mini_batch, plan.actor.num_ranks,
                     section.model, reads, Phase.UPDATE_ACTOR)  # fmt: skip
    if has_critic(config):
        critic_pass = Pass(
            critic, longest, longest, dtype, is_critic=True, lora_rank=own.model.lora_rank,
            ranks_per_shard=plan.critic.ranks_per_shard,
        )  # fmt: skip
        yield from needs(critic_pass, critic_budgets(config), own.ppo_mini_batch_size or mini_batch,
                         plan.critic.num_ranks, own.model, frozenset({Phase.VALUES}),
                         Phase.UPDATE_CRITIC)  # fmt: skip


MAX_GATHERED = 3
"""Blocks whose gathered weights exist at once, if a block's are freed after it has computed."""


def first_gather_bytes(work: Pass, item: int, num_ranks: int, has_gradients: bool) -> int:
    """Return the bytes that the start of a pass needs in place of its activations.

    FSDP2 gathers a group into one buffer and copies the weights out of it. The buffer of embedding,
    head and last norm still exists when the first block has been gathered and copied, while no
    activations but the embedded tokens exist. Of what `gathered_needs` counts, the other blocks and
    a block's gradient do not exist yet.
    """
    if num_ranks == 1:
        return 0
    shape = work.shape
    root = shape.root(not work.is_critic or work.lora_rank > 0)
    absent = (min(MAX_GATHERED, shape.layers) - 2) * item * shape.block_parameters
    if has_gradients:
        absent += (item + 2 * FLOAT) * shape.block_parameters
    return item * (root + shape.hidden * work.tokens // work.ranks_per_shard) - absent


SAMPLING_COPIES = 3
"""Float32 copies of the logits of all decoded sequences: logits, log-softmax and sorting."""


@dataclass(frozen=True)
class EngineMemory:
    """Memory of one engine on each of its devices, in bytes."""

    share: int
    """All memory that the engine may use."""
    weights: int
    working: int
    """Activations of one batch of prompt tokens, logits of all decoded sequences, graphs."""
    per_token: int
    """KV cache of one token."""
    memory: Memory
    """The engine's devices: the ranks', or its own."""

    @property
    def cache(self) -> int:
        """Bytes left for the KV cache; negative if not even the weights fit."""
        return self.share - self.weights - self.working

    @property
    def cached_tokens(self) -> int:
        """Number of tokens that fit in the KV cache."""
        return max(0, self.cache) // self.per_token


def kv_bytes(shape: ModelShape, item: int, size: int = 1) -> int:
    """Return the KV cache bytes per token on each of `size` devices; `item`: bytes of a value."""
    return 2 * shape.layers * max(1, shape.kv_heads // size) * shape.head_dim * item


def _working_bytes(shape: ModelShape, item: int, seqs: int, tokens: int, size: int = 1) -> int:
    """Return the bytes of a step's activations for `tokens`, and of the logits of `seqs`."""
    activations = tokens * item * (2 * shape.hidden + 3 * shape.max_outputs // size)
    return activations + SAMPLING_COPIES * FLOAT * seqs * shape.vocab


def engine_memory(config: Config, shape: ModelShape, item: int, device_bytes: int) -> EngineMemory:
    """Return the memory of an engine on GPUs of `device_bytes`.

    vLLM takes the share `gpu_memory_utilization` of it, profiles a forward pass of its largest
    batch, and uses the rest of its share as KV cache.
    """
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    size, seqs = rollout.tensor_model_parallel_size, config.max_num_seqs(on_gpu=True)
    weights = item * shape.parameters()
    if quantizes_weights(rollout.engine_kwargs):  # matrices in the blocks have one byte per value
        weights -= (item - 1) * shape.linear_weights
    weights //= size
    if not chosen(config).is_whole:
        max_rank = next(rank for rank in VLLM_LORA_RANKS if rank >= model.lora_rank)
        weights += item * shape.adapter(max_rank) // size
    return EngineMemory(
        share=int(rollout.gpu_memory_utilization * device_bytes),
        weights=weights,
        working=_working_bytes(shape, item, seqs, batched_tokens(seqs), size) + ENGINE_OTHER,
        per_token=kv_bytes(shape, 1 if quantizes_cache(rollout.engine_kwargs) else item, size),
        memory=Memory.ENGINE if config.placement.is_split else Memory.DEVICE,
    )


def gpu_engine_needs(config: Config, shape: ModelShape, item: int, share: int) -> Iterator[Need]:
    """Yield the needs of an engine on GPUs; on the ranks' GPUs it sleeps while the ranks compute.

    A sleeping engine drops its KV cache and its weights (sleep level 2), since new weights arrive
    before the next request. With an adapter, the base's weights are kept on the host in pinned
    memory instead (level 1).
    """
    if config.placement.is_split:
        yield Need(Memory.ENGINE, "engine", share)
        return
    yield Need(Memory.DEVICE, "engine, awake", share, AWAKE)
    yield Need(Memory.DEVICE, "engine, asleep", ENGINE_ASLEEP, ASLEEP)
    if not chosen(config).is_whole:
        size = config.actor_rollout_ref.rollout.tensor_model_parallel_size
        base_bytes = config.trainer.n_gpus_per_node * pinned_bytes(shape.tensors(), item, size)
        yield Need(Memory.HOST, "sleeping engines' weights", base_bytes)


def other_engine_needs(
    config: Config, shape: ModelShape, item: int, on_gpu: bool
) -> Iterator[Need]:
    """Yield the known needs of an engine other than vLLM: weights, and cache of one dialogue.

    The transformers engine continues several together, in the cache that it may fill.
    """
    rollout = config.actor_rollout_ref.rollout
    if rollout.name == "remote":
        return
    cache = config.data.max_model_len * kv_bytes(shape, item)
    if rollout.name == "transformers":
        rows = config.max_num_seqs(on_gpu)
        cache = max(cache, min(rows * cache, rollout.cpu_kv_cache_gib << 30))
    size = item * shape.parameters() + cache
    if not on_gpu:
        count = -(-config.placement.num_engines(on_gpu=False) // config.placement.actor.num_nodes)
        yield Need(Memory.HOST, "engines", count * size)
    elif config.placement.is_split:
        yield Need(Memory.ENGINE, "engine", size)
    else:
        yield Need(Memory.DEVICE, "engine, awake", size, AWAKE)


def cpu_engine_needs(config: Config, shape: ModelShape, item: int) -> Iterator[Need]:
    """Yield the needs of vLLM engines on CPU, which never sleep; their KV cache size is fixed."""
    count = -(-config.placement.num_engines(on_gpu=False) // config.placement.actor.num_nodes)
    seqs = config.max_num_seqs(on_gpu=False)
    working = _working_bytes(shape, item, seqs, batched_tokens(seqs, config.data.max_model_len))
    cache = config.actor_rollout_ref.rollout.cpu_kv_cache_gib << 30
    yield Need(Memory.HOST, "engines: weights", count * item * shape.parameters())
    yield Need(Memory.HOST, "engines: KV cache", count * cache)
    yield Need(Memory.HOST, "engines: activations", count * working)
