"""Checks whether a retriever leaves enough memory to the trainer: `memory.py PID TRAINER_GIB`.

It sums the memory of PID and its descendants on this node, with the standard library only. Exit
status 1: less than TRAINER_GIB is left next to the retriever's private memory.
"""

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30
LARGE = 64 << 20
"""Minimum bytes of a mapped file that counts as an index or corpus; smaller ones are libraries."""
FIX = (
    "give sbatch more --mem, run the retriever in a separate job (retriever.sbatch, "
    "RETRIEVER_FILE), or take a smaller index (docs/guides/retrieval.md)"
)


@dataclass(frozen=True)
class Held:
    """Memory of several processes, in bytes."""

    private: int
    """Memory that cannot be reclaimed while the processes run."""
    hot: int
    """Pages of mapped files that are in memory; the kernel may drop them."""
    mapped: int
    """Size of the large mapped files, which is `hot` if all of them are read."""


def family(pid: int, proc: Path = Path("/proc")) -> Iterator[int]:
    """Yield the ids of a process and all its descendants."""
    yield pid
    for task in (proc / str(pid) / "task").glob("*"):
        with contextlib.suppress(OSError):  # the thread has ended
            for child in (task / "children").read_text().split():
                yield from family(int(child), proc)


def held(pids: Iterator[int], proc: Path = Path("/proc")) -> Held:
    """Return the total memory of the processes."""
    private = hot = 0
    files: dict[str, int] = {}
    for pid in pids:
        try:
            status, maps = ((proc / str(pid) / name).read_text() for name in ("status", "maps"))
        except OSError:  # the process has ended
            continue
        sizes = {n: int(kb) << 10 for n, kb in re.findall(r"^(\w+):\s+(\d+) kB", status, re.M)}
        private += sizes.get("RssAnon", 0) + sizes.get("RssShmem", 0)
        hot += sizes.get("RssFile", 0)
        mapping = r"^(\w+)-(\w+) \S+ \S+ \S+ [1-9]\d*\s+(/.*)$"
        for start, end, path in re.findall(mapping, maps, re.M):
            files[path] = max(files.get(path, 0), int(end, 16) - int(start, 16))
    return Held(private, hot, sum(size for size in files.values() if size >= LARGE))


def limit(environment: Mapping[str, str]) -> int:
    """Return the bytes the job may use on this node; Slurm sets MiB, or 0 for the whole node."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    per_cpu = int(environment.get("SLURM_MEM_PER_CPU") or 0)
    mib = int(environment.get("SLURM_MEM_PER_NODE") or 0)
    mib = mib or per_cpu * int(environment.get("SLURM_CPUS_ON_NODE") or 0)
    return min(mib << 20, whole) if mib else whole


def report(retriever: Held, total: int, trainer: int) -> tuple[bool, str]:
    """Return whether enough bytes are left for the trainer, and a message with the figures."""
    left = total - retriever.private
    lines = [
        f"memory of the job on this node: {total / GIB:.1f} GiB; the retriever holds "
        f"{retriever.private / GIB:.1f} GiB, and {retriever.hot / GIB:.1f} GiB of mapped files are "
        f"in memory, of {retriever.mapped / GIB:.1f}; left for the trainer: {left / GIB:.1f} GiB"
    ]
    if left < trainer:
        got, expected = f"{left / GIB:.1f} GiB", f"TRAINER_MEM={trainer / GIB:.0f} GiB"
        lines.append(f"memory left by the retriever: got {got}, expected {expected}; fix: {FIX}")
    elif left < trainer + retriever.mapped:
        lines.append(
            f"with a trainer of {trainer / GIB:.0f} GiB the mapped index does not stay in "
            f"memory, so searches will read the disk; to avoid it: {FIX}"
        )
    return left >= trainer, "\n".join(lines)


def main() -> int:
    """Run the command line; returns the exit status."""
    pid, trainer = int(sys.argv[1]), float(sys.argv[2])
    fits, message = report(held(family(pid)), limit(os.environ), int(trainer * GIB))
    (sys.stdout if fits else sys.stderr).write(f"{message}\n")
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
