"""Monitors the host's memory in a thread and warns before Ray or the kernel kills a process.

Ray kills a process of its choice when a node's memory use reaches RAY_memory_usage_threshold; the
kernel kills one at the limit. Neither reports who used the memory; the warning from here does.
"""

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
from verl.single_controller.actors import ActorLocation
from verl.single_controller.reaper import MARK, REPLICA_MARK, environment

logger = logging.getLogger(__name__)

RAY_THRESHOLD = "RAY_memory_usage_threshold"
RAY_DEFAULT = 0.95
MIN_BYTES = 50_000_000
"""Smaller processes are summed into one entry."""
COMMAND_LENGTH = 60
"""Characters of the command line that name a process which is neither rank nor replica."""
MARGIN = 0.03
"""Minimum share of the memory by which the warning precedes Ray's threshold."""
REPEAT_AT = 0.5
"""The warning is repeated when free memory has fallen to this fraction of the last warning's."""
RECENT_S = 120.0
"""Maximum age in seconds of a report that is quoted to explain the loss of a process."""
ADVICE = {
    "critic rank": "fewer critic.n_gpus_per_node, a smaller critic.ppo_max_token_len_per_gpu, or "
                   "critic.model.lora_rank=32",
    "rank": "fewer trainer.n_gpus_per_node, a smaller ppo_max_token_len_per_gpu, lora_rank=32, or "
            "fsdp_config.*_offload=false",
    "replica": "rollout.cpu_kv_cache_gib, or a larger rollout.tensor_model_parallel_size",
    "driver": "data.train_batch_size",
}  # fmt: skip
"""Options to lower, by the prefix of the name of the process that uses most memory."""
OTHERS = "end other programs, or run them (a tool's server) on another machine"


@dataclass(frozen=True)
class Usage:
    """The memory of one process, or of several processes with the same name."""

    name: str
    bytes: int
    is_ours: bool = True
    """Whether the process is part of the run, not another program on this machine."""


@dataclass
class HostWatch:
    """Checks the memory every `seconds` (0: never); warns if less than the share `low` is free."""

    seconds: float = 0.0
    low: float = 0.1
    names: Mapping[int, str] = field(default_factory=dict)
    """Names of known processes, such as `rank 0`, by process id."""
    read: Callable[[], HostMemory] = HostMemory.now
    report: str | None = field(init=False, default=None)
    """The last warning about low memory."""

    def __post_init__(self) -> None:
        threshold = float(os.environ.get(RAY_THRESHOLD, RAY_DEFAULT))
        self.low = max(self.low, 1 - threshold + MARGIN)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="host-memory", daemon=True)
        self._worst: HostMemory | None = None
        self._warned_free, self._warned_at = math.inf, -math.inf

    def start(self) -> None:
        """Start the thread, unless `seconds` is 0."""
        if self.seconds > 0:
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self.seconds):
            self.check()

    def check(self) -> HostMemory:
        """Read the memory now and warn if it is low."""
        memory, worst = self.read(), self._worst  # read once: `metrics` resets it in another thread
        if worst is None or memory.free < worst.free:
            self._worst = memory
        if memory.free >= self.low * memory.total:
            self._warned_free = math.inf
        elif memory.free < REPEAT_AT * self._warned_free:
            self._warned_free, self._warned_at = memory.free, time.monotonic()
            self.report = describe(memory, memory_by_process(self.names))
            logger.warning("%s", self.report)
        return memory

    @property
    def recent_report(self) -> str | None:
        """The last report, unless it is older than `RECENT_S`."""
        return self.report if time.monotonic() - self._warned_at < RECENT_S else None

    def metrics(self) -> dict[str, float]:
        """Return `perf/host_memory_*` at the lowest free memory since the last call."""
        self.check()
        worst, self._worst = self._worst, None
        assert worst is not None
        return {"perf/host_memory_free_gb": worst.free / GB,
                "perf/host_memory_used_share": worst.used_share}  # fmt: skip


def rank_names(
    locations: Sequence[ActorLocation], node_id: str, kind: str = "rank"
) -> dict[int, str]:
    """Return the names of the ranks on this node, such as `rank 0`, by process id."""
    return {x.pid: f"{kind} {i}" for i, x in enumerate(locations) if x.node_id == node_id}


def describe(memory: HostMemory, usages: Sequence[Usage]) -> str:
    """Return one line: the free memory, the processes that use the rest, and options to lower."""
    ours = [f"{usage.name} {format_bytes(usage.bytes)}" for usage in usages if usage.is_ours]
    others = [f"{usage.name} {format_bytes(usage.bytes)}" for usage in usages if not usage.is_ours]
    in_shared = shutil.disk_usage(SHARED_MEMORY).used if SHARED_MEMORY.exists() else 0
    shared = f"; /dev/shm {format_bytes(in_shared)} (weights, Ray's objects)" if in_shared else ""
    foreign = f"; not part of this run: {', '.join(others[:5])}" if others else ""
    largest = usages[0].name if usages and usages[0].is_ours else ""
    advice = next((text for prefix, text in ADVICE.items() if largest.startswith(prefix)), OTHERS)
    return (
        f"host memory is nearly used up: {format_bytes(memory.free)} of "
        f"{format_bytes(memory.total)} are free "
        "(Ray and the kernel kill processes when none is left); this run: "
        f"{', '.join(ours)}{shared}{foreign}; to need less: {advice}"
    )


@contextlib.contextmanager
def watch_host_memory(config: Config) -> Iterator[HostWatch]:
    """Monitor the host's memory during the body; yields the watch.

    If the body loses a rank or replica, a recent report is appended to the error.
    """
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


def memory_by_process(names: Mapping[int, str] | None = None) -> list[Usage]:
    """Return the memory of the run's and other processes, largest first.

    Processes below `MIN_BYTES` are summed into one entry for the run and one for other programs.
    `names` gives the names of known processes by id. Only private memory counts: pages of files
    and of /dev/shm, which several processes may map, are left out.
    """
    mark = f"{MARK}={os.environ.get(MARK)}".encode()
    totals = Counter[tuple[str, bool]]()
    family = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    for process in psutil.process_iter():
        try:
            memory = process.memory_info()
            variables = environment(process)
            name = (names or {}).get(process.pid) or _name(process, variables)
        except psutil.Error:
            continue  # the process has ended
        is_ours = process.pid in family or mark in variables
        private = memory.rss - memory.shared
        if private < MIN_BYTES:
            name = "other processes" if is_ours else "other programs"
        totals[name, is_ours] += max(private, 0)
    return [Usage(name, size, is_ours) for (name, is_ours), size in totals.most_common()]


def _name(process: psutil.Process, variables: Sequence[bytes]) -> str:
    if process.pid == os.getpid():
        return "driver"
    parts = [entry.decode() for entry in variables if entry.startswith(REPLICA_MARK.encode())]
    command = " ".join(process.cmdline())[:COMMAND_LENGTH] or str(process.name())
    return parts[0].rpartition("/")[2] if parts else command
