"""What a rollout engine holds: its share of the devices, and of the host while it sleeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from verl.config import Config
from verl.preflight.memory.needs import (
    ASLEEP,
    AWAKE,
    FLOAT,
    GPU,
    MIB,
    Need,
    Place,
    power_of_two,
)
from verl.preflight.memory.shape import ModelShape
from verl.rollout.vllm_engine import VLLM_LORA_RANKS, batched_tokens
from verl.training.devices import engine_takes_adapter

POOL = 20 * MIB
"""torch serves tensors below half of this from shared pieces of this size."""
SAMPLING_COPIES = 3
"""Float32 copies of the logits of all decoded sequences: logits, their log-softmax, sorting."""


@dataclass(frozen=True)
class EngineRoom:
    """What one engine has on each of its devices, in bytes."""

    share: int
    """All it may take."""
    weights: int
    working: int
    """Activations of one batch of prompt tokens, logits of all decoded sequences, graphs."""
    per_token: int
    """KV cache of one token."""

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
    heads = max(1, shape.kv_heads // size)
    return 2 * shape.layers * heads * shape.head_dim * item


def engine_room(config: Config, shape: ModelShape, item: int, device_bytes: int) -> EngineRoom:
    """An engine on GPUs of `device_bytes`; vLLM takes `gpu_memory_utilization` of all of it.

    It profiles a forward of its largest batch, and what is left of its share becomes KV cache.
    """
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    size = rollout.tensor_model_parallel_size
    weights = item * shape.parameters() // size
    if engine_takes_adapter(config):
        room = next(rank for rank in VLLM_LORA_RANKS if rank >= model.lora_rank)
        weights += item * shape.adapter(room) // size
    seqs = config.max_num_seqs(on_gpu=True)
    acts = batched_tokens(seqs) * item * (2 * shape.hidden + 3 * shape.intermediate // size)
    sampled = SAMPLING_COPIES * FLOAT * seqs * shape.vocab
    return EngineRoom(
        share=int(rollout.gpu_memory_utilization * device_bytes),
        weights=weights,
        working=acts + sampled + GPU.engine_other,
        per_token=kv_bytes(shape, item, size),
    )


def gpu_engine_needs(
    config: Config, shape: ModelShape, item: int, device_bytes: int
) -> Iterator[Need]:
    """An engine on the ranks' GPUs: awake from generation on, asleep while ranks compute.

    Asleep, the KV cache is dropped, and so are whole weights (level 2): new ones come before the
    next request. Below an adapter they wait on the host in pinned memory (level 1).
    """
    room = engine_room(config, shape, item, device_bytes)
    yield Need(Place.DEVICE, "engine, awake", room.share, AWAKE)
    yield Need(Place.DEVICE, "engine, asleep", GPU.engine_asleep, ASLEEP)
    if engine_takes_adapter(config):
        backup = config.trainer.n_gpus_per_node * backup_bytes(config, shape, item)
        yield Need(Place.HOST, "engines' weights while they sleep", backup)


def backup_bytes(config: Config, shape: ModelShape, item: int) -> int:
    """Pinned host memory of one device's weights: each piece of torch's pool rounded up.

    vLLM joins query, key and value, and gate and up, into one tensor each.
    """
    h, i, size = shape.hidden, shape.intermediate, config.actor_rollout_ref.rollout
    parts = size.tensor_model_parallel_size
    qkv = h * (shape.query_size + 2 * shape.kv_size)
    tensors = (qkv, h * shape.query_size, 2 * h * i, h * i) * shape.layers
    tensors += (shape.vocab * h,) * (1 if shape.is_tied else 2)
    return sum(_backup(item * numel // parts) for numel in tensors)


def _backup(size: int) -> int:
    """Pinned bytes for a tensor: of its own piece, or of its part of a shared one."""
    if size < POOL // 2:
        return size * power_of_two(POOL) // POOL
    return power_of_two(-(-size // (2 * MIB)) * 2 * MIB)


def cpu_engine_needs(config: Config, shape: ModelShape, item: int) -> Iterator[Need]:
    """Engines on CPU never sleep: weights, a KV cache of fixed size, one batch's activations."""
    rollout = config.actor_rollout_ref.rollout
    count = -(-config.num_engines(on_gpu=False) // config.trainer.nnodes)
    seqs = config.max_num_seqs(on_gpu=False)
    batch = batched_tokens(seqs, config.data.max_model_len)
    working = batch * item * (2 * shape.hidden + 3 * shape.intermediate)
    working += SAMPLING_COPIES * FLOAT * seqs * shape.vocab
    yield Need(Place.HOST, "engines: weights", count * item * shape.parameters())
    yield Need(Place.HOST, "engines: KV cache", count * (rollout.cpu_kv_cache_gib << 30))
    yield Need(Place.HOST, "engines: activations", count * working)
