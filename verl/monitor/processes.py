"""Which processes of this machine are the run's, what each is, and the memory that is its own."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import psutil

from verl.single_controller.reaper import MARK, PART

RETRIEVER = "retrieval_server"
MIN_BYTES = 50_000_000
"""Smaller processes are added up."""


@dataclass(frozen=True)
class Usage:
    """A process, or several of a kind, and their memory."""

    name: str
    bytes: int
    is_ours: bool = True
    """Part of the run; else another program of this machine."""


def usages(names: Mapping[int, str] | None = None) -> list[Usage]:
    """The run's processes, and the larger ones of others, by falling size.

    `names` says which process (by id) is which rank. Memory is what a process alone holds: pages
    of files and of /dev/shm, which many map, are not in it.
    """
    mark, found = os.environ.get(MARK), []
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    for process in psutil.process_iter():
        try:
            memory = process.memory_info()
            own = memory.rss - memory.shared
            if own <= 0:
                continue
            part = _marks(process)
            is_ours = process.pid in children or (mark is not None and part.get(MARK) == mark)
            is_ours = is_ours or process.pid == os.getpid()
            name = (names or {}).get(process.pid) or _name(process, part.get(PART), is_ours)
            found.append(Usage(name, own, is_ours))
        except (psutil.Error, OSError):
            continue  # gone by now
    return sorted(_added_up(found), key=lambda usage: -usage.bytes)


def _marks(process: psutil.Process) -> Mapping[str, str]:
    """A process's environment; nothing of another user's."""
    try:
        return dict(process.environ())
    except psutil.AccessDenied:
        return {}


def _name(process: psutil.Process, part: str | None, is_ours: bool) -> str:
    """What a process is to a reader."""
    if process.pid == os.getpid():
        return "driver"
    command = process.cmdline()
    if any(RETRIEVER in word for word in command):
        return "retriever"
    if not is_ours:
        return str(process.name())
    title = " ".join(command)
    if part is not None:
        kind = " (engine core)" if "EngineCore" in title else ""
        return part.rpartition("/")[2] + kind
    if "EngineCore" in title:
        return "engine core"
    return "rank or replica" if title.startswith("ray::") else f"Ray ({process.name()})"


def _added_up(found: Iterable[Usage]) -> list[Usage]:
    """One usage a name; small ones of a side become one."""
    sums: dict[tuple[str, bool], int] = {}
    for usage in found:
        small = "other processes" if usage.is_ours else "other programs"
        name = usage.name if usage.bytes >= MIN_BYTES else small
        sums[name, usage.is_ours] = sums.get((name, usage.is_ours), 0) + usage.bytes
    return [Usage(name, size, is_ours) for (name, is_ours), size in sums.items()]
