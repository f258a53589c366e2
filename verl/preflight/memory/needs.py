"""When and where memory is held, and the constants that nobody can compute.

Constants are round numbers for things outside our tensors (contexts, libraries, processes); those
of the CPU were measured, those of the GPU are read from published logs (docs/memory.md).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

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
WHILE = {
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
    what: str
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
