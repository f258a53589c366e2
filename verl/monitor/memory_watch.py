"""The host's memory during a run: a thread reads it, and warns before Ray or the kernel kills.

Ray ends a process of its choice when a node's memory is used up to RAY_memory_usage_threshold; the
kernel does so at the limit. Neither says what had used it: the line from here does.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import psutil

from verl.config import Config
from verl.errors import RankLost, ReplicaLost
from verl.machine import GB, SHARED_MEMORY, HostMemory, format_bytes
from verl.single_controller.actors import Place
from verl.single_controller.reaper import MARK, PART, environment

logger = logging.getLogger(__name__)

RAY_THRESHOLD = "RAY_memory_usage_threshold"
RAY_DEFAULT = 0.95
MIN_BYTES = 50_000_000
"""Smaller processes are added up."""
COMMAND_LENGTH = 60
"""Characters of a command that name a process which is neither rank nor replica."""
AHEAD = 0.03
"""Share of the memory by which the line comes before Ray's threshold, at the least."""
AGAIN = 0.5
"""It comes again when what is free has fallen to this much of what it was then."""
RECENT_S = 120.0
"""How old a report may be to explain the loss of a process."""
ADVICE = {
    "critic rank": "fewer critic.n_gpus_per_node, a smaller critic.ppo_max_token_len_per_gpu, or "
                   "critic.model.lora_rank=32",
    "rank": "fewer trainer.n_gpus_per_node, a smaller ppo_max_token_len_per_gpu, lora_rank=32, or "
            "fsdp_config.*_offload=false",
    "replica": "rollout.cpu_kv_cache_gib, or a larger rollout.tensor_model_parallel_size",
    "driver": "data.train_batch_size",
}  # fmt: skip
"""What to lower, by what the largest user's name begins with."""
OTHERS = "end other programs, or run them (a tool's server) on another machine"


@dataclass
class HostWatch:
    """Looks every `seconds`, if above 0; warns when less than `low` of the memory is free."""

    seconds: float = 0.0
    low: float = 0.1
    names: Mapping[int, str] = field(default_factory=dict)
    """What processes are, by id, where it is known: `rank 0` …"""
    read: Callable[[], HostMemory] = HostMemory.now
    report: str | None = field(init=False, default=None)
    """The last line about memory that was nearly used up."""

    def __post_init__(self) -> None:
        threshold = float(os.environ.get(RAY_THRESHOLD, RAY_DEFAULT))
        self.low = max(self.low, 1 - threshold + AHEAD)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="host-memory", daemon=True)
        self._worst: HostMemory | None = None
        self._warned_free, self._warned_at = math.inf, -math.inf

    def start(self) -> None:
        """Begin to look, unless `seconds` is 0."""
        if self.seconds > 0:
            self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self.seconds):
            self.look()

    def look(self) -> HostMemory:
        """Read the memory now, and warn if there is reason to."""
        memory = self.read()
        if self._worst is None or memory.free < self._worst.free:
            self._worst = memory
        if memory.free >= self.low * memory.total:
            self._warned_free = math.inf
        elif memory.free < AGAIN * self._warned_free:
            self._warned_free, self._warned_at = memory.free, time.monotonic()
            self.report = describe(memory, usages(self.names))
            logger.warning("%s", self.report)
        return memory

    @property
    def recent_report(self) -> str | None:
        """The last report, if it is not long ago."""
        return self.report if time.monotonic() - self._warned_at < RECENT_S else None

    def metrics(self) -> dict[str, float]:
        """The worst since the last call, `perf/host_memory_*`."""
        self.look()
        worst, self._worst = self._worst, None
        assert worst is not None
        return {"perf/host_memory_free_gb": worst.free / GB,
                "perf/host_memory_used_share": worst.used_share}  # fmt: skip


def rank_names(places: Sequence[Place], node_id: str, kind: str = "rank") -> dict[int, str]:
    """The number of each rank on this node, by the id of its process."""
    return {place.pid: f"{kind} {i}" for i, place in enumerate(places) if place.node_id == node_id}


def describe(memory: HostMemory, found: Sequence[Usage]) -> str:
    """One line: how much is left, who has the rest, and what to lower."""
    ours, others = ([f"{usage.name} {format_bytes(usage.bytes)}" for usage in found
                     if usage.is_ours is is_ours] for is_ours in (True, False))  # fmt: skip
    in_shared = shutil.disk_usage(SHARED_MEMORY).used if SHARED_MEMORY.exists() else 0
    shared = f"; /dev/shm {format_bytes(in_shared)} (weights, Ray's objects)" if in_shared else ""
    beside = f"; not of this run: {', '.join(others[:5])}" if others else ""
    largest = found[0].name if found else ""
    advice = next((text for word, text in ADVICE.items() if largest.startswith(word)), OTHERS)
    return (
        f"host memory is nearly used up: {format_bytes(memory.free)} of "
        f"{format_bytes(memory.total)} are free "
        "(Ray and the kernel end processes when there is none); this run: "
        f"{', '.join(ours)}{shared}{beside}; to need less: {advice}"
    )


@contextlib.contextmanager
def watching(config: Config) -> Iterator[HostWatch]:
    """A watch as long as the body; the error of a process lost in it ends with the last report."""
    watch = HostWatch(config.trainer.memory_watch_seconds, config.trainer.memory_low)
    watch.start()
    try:
        yield watch
    except (RankLost, ReplicaLost) as error:
        if watch.recent_report is None:
            raise
        raise type(error)(f"{error}; {watch.recent_report}") from error
    finally:
        watch.stop()


@dataclass(frozen=True)
class Usage:
    """A process, or several of a kind, and their memory."""

    name: str
    bytes: int
    is_ours: bool = True
    """Part of the run; else another program of this machine."""


def usages(names: Mapping[int, str] | None = None) -> list[Usage]:
    """The run's processes, and the larger ones of others, by falling size; small ones are one.

    `names` says which process (by id) is which rank. Memory is what a process alone holds: pages
    of files and of /dev/shm, which many map, are not in it.
    """
    mark, sums = f"{MARK}={os.environ.get(MARK)}".encode(), Counter[tuple[str, bool]]()
    family = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    for process in psutil.process_iter():
        try:
            memory = process.memory_info()
            variables = environment(process)
            name = (names or {}).get(process.pid) or _name(process, variables)
        except psutil.Error:
            continue  # gone by now
        is_ours = process.pid in family or mark in variables
        own = memory.rss - memory.shared
        small = "other processes" if is_ours else "other programs"
        sums[name if own >= MIN_BYTES else small, is_ours] += max(own, 0)
    return [Usage(name, size, is_ours) for (name, is_ours), size in sums.most_common()]


def _name(process: psutil.Process, variables: Sequence[bytes]) -> str:
    """Which part of a run a process is, or how its command begins."""
    if process.pid == os.getpid():
        return "driver"
    parts = [entry.decode() for entry in variables if entry.startswith(PART.encode())]
    command = " ".join(process.cmdline())[:COMMAND_LENGTH] or str(process.name())
    return parts[0].rpartition("/")[2] if parts else command
