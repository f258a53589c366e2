"""What a rollout engine holds: its share of the devices, and of the host while it sleeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from verl.config import Config
from verl.config.policy import VLLM_LORA_RANKS
from verl.model_shape import ModelShape
from verl.preflight.memory.needs import (
    ASLEEP,
    AWAKE,
    ENGINE_ASLEEP,
    ENGINE_OTHER,
    FLOAT,
    Memory,
    Need,
    pinned,
)
from verl.rollout.interface import engine_takes_adapter
from verl.rollout.vllm_engine import batched_tokens

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


def cpu_engine_needs(config: Config, shape: ModelShape, item: int) -> Iterator[Need]:
    """Engines on CPU never sleep: weights, a KV cache of fixed size, one batch's activations."""
    count = -(-config.num_engines(on_gpu=False) // config.trainer.nnodes)
    seqs = config.max_num_seqs(on_gpu=False)
    working = _working(shape, item, seqs, batched_tokens(seqs, config.data.max_model_len))
    cache = config.actor_rollout_ref.rollout.cpu_kv_cache_gib << 30
    yield Need(Memory.HOST, "engines: weights", count * item * shape.parameters())
    yield Need(Memory.HOST, "engines: KV cache", count * cache)
    yield Need(Memory.HOST, "engines: activations", count * working)
