"""Whose turn it is to read a whole model: ranks of one node share its memory."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from verl.memory.machine import HostMemory

logger = logging.getLogger(__name__)

WEIGHT_SUFFIXES = (".safetensors", ".bin")
FLOAT32_FACTOR = 2
"""Bytes of a model in float32 per byte of its files, which are bfloat16 as a rule."""
MEMORY_SHARE = 0.5
"""Share of the free memory that models may take while they are read all at once."""


def weight_bytes(path: str) -> int:
    """Size of a model's weights in its folder or the hub's cache; 0 where it is not known yet."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        try:
            cached = try_to_load_from_cache(path, "config.json")
        except HFValidationError:
            return 0  # neither a folder nor a name
        if not isinstance(cached, str):
            return 0
        folder = Path(cached).parent
    files = (file for file in folder.iterdir() if file.name.endswith(WEIGHT_SUFFIXES))
    return sum(file.stat().st_size for file in files)


def needs_turns(largest: int, num_ranks: int, free: int) -> bool:
    """Whether `num_ranks` models with files of `largest` bytes are too much for `free` bytes."""
    return num_ranks * FLOAT32_FACTOR * largest > MEMORY_SHARE * free


@contextlib.contextmanager
def loading_turn(paths: Iterable[str], num_ranks: int) -> Iterator[None]:
    """Wait for the other ranks of this node to have read their models, where memory is short.

    `num_ranks` of them read those at `paths`, in float32, one model after another.
    """
    largest = max(weight_bytes(path) for path in paths)
    if not needs_turns(largest, num_ranks, HostMemory.now().free):
        yield
        return
    lock = os.open(
        Path(tempfile.gettempdir()) / f"search-r1-loading-{os.getuid()}.lock",
        os.O_CREAT | os.O_RDWR,
        0o600,
    )
    try:
        logger.info("models are read one rank after another, for lack of memory to do it at once")
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
