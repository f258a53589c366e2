"""What a retriever leaves of a job's memory for the trainer: `memory.py PID TRAINER_GIB`.

Counts the processes below PID on this node by the standard library alone. Exit status 1: less
than TRAINER_GIB is left beside what the retriever holds for itself.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30
LARGE = 64 << 20
"""Bytes of a mapped file that count as an index or a corpus: smaller ones are libraries."""
FIX = (
    "give sbatch more --mem, run the retriever in a job of its own (retriever.sbatch, "
    "RETRIEVER_FILE), or take a smaller index (docs/backends.md)"
)


@dataclass(frozen=True)
class Held:
    """Bytes of some processes."""

    private: int
    """That nobody else can have while they live."""
    hot: int
    """Pages of mapped files that are in memory now; the kernel may drop them."""
    mapped: int
    """Large files that are mapped: what would be hot if all of it were read."""


def family(pid: int, proc: Path = Path("/proc")) -> Iterator[int]:
    """A process and all below it."""
    yield pid
    for task in (proc / str(pid) / "task").glob("*"):
        for child in (task / "children").read_text().split():
            yield from family(int(child), proc)


def held(pids: Iterator[int], proc: Path = Path("/proc")) -> Held:
    """What they hold together."""
    private = hot = 0
    files: dict[str, int] = {}
    for pid in pids:
        status = (proc / str(pid) / "status").read_text()
        sizes = {n: int(kb) << 10 for n, kb in re.findall(r"^(\w+):\s+(\d+) kB", status, re.M)}
        private += sizes.get("RssAnon", 0) + sizes.get("RssShmem", 0)
        hot += sizes.get("RssFile", 0)
        for start, end, path in re.findall(
            r"^(\w+)-(\w+) \S+ \S+ \S+ [1-9]\d*\s+(/.*)$",
            (proc / str(pid) / "maps").read_text(), re.M,
        ):  # fmt: skip
            files[path] = max(files.get(path, 0), int(end, 16) - int(start, 16))
    return Held(private, hot, sum(size for size in files.values() if size >= LARGE))


def limit(environment: Mapping[str, str]) -> int:
    """Bytes that the job may use on this node; Slurm gives MiB, and 0 for all of the node."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    per_cpu = int(environment.get("SLURM_MEM_PER_CPU") or 0)
    given = int(environment.get("SLURM_MEM_PER_NODE") or 0)
    given = given or per_cpu * int(environment.get("SLURM_CPUS_ON_NODE") or 0)
    return min(given << 20, whole) if given else whole


def report(found: Held, total: int, trainer: int) -> tuple[bool, str]:
    """Whether the trainer's bytes are left, and the account in words."""
    left = total - found.private
    lines = [
        f"memory of the job on this node: {total / GIB:.1f} GiB; the retriever holds "
        f"{found.private / GIB:.1f} GiB, and {found.hot / GIB:.1f} GiB of mapped files are in "
        f"memory, of {found.mapped / GIB:.1f}; left for the trainer: {left / GIB:.1f} GiB"
    ]
    if left < trainer:
        got, expected = f"{left / GIB:.1f} GiB", f"TRAINER_MEM={trainer / GIB:.0f} GiB"
        lines.append(f"memory beside the retriever: got {got}, expected {expected}; fix: {FIX}")
    elif left < trainer + found.mapped:
        lines.append(
            f"beside a trainer of {trainer / GIB:.0f} GiB the mapped index does not stay in "
            f"memory, so searches will read the disk; to avoid it: {FIX}"
        )
    return left >= trainer, "\n".join(lines)


def main() -> int:
    """The command line."""
    pid, trainer = int(sys.argv[1]), float(sys.argv[2])
    fits, words = report(held(family(pid)), limit(os.environ), int(trainer * GIB))
    (sys.stdout if fits else sys.stderr).write(f"{words}\n")
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
