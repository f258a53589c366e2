"""The servers that are compared, each a child process: ours with its engines, and the baseline."""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import psutil

from benchmarks.retrieval.corpora import Place
from search_r1.search.local_server import MODULE, LocalServer

START_S = 600.0
BASELINES = ("baseline", "baseline-concurrent")
BASELINE = "benchmarks.retrieval.baseline_server"


@dataclass(frozen=True)
class Running:
    """A server that answers."""

    url: str
    pid: int
    start_seconds: float
    """From the start of the process to its first healthy answer."""

    def cpu_seconds(self) -> float:
        """Processor time that the server has used so far."""
        times = psutil.Process(self.pid).cpu_times()
        return float(times.user + times.system)

    def counters(self) -> dict[str, float]:
        """The sums and counts of its `/metrics` by name and labels; empty for the baseline."""
        answer = httpx.get(f"{self.url}/metrics", timeout=30.0, trust_env=False)
        return read_counters(answer.text) if answer.is_success else {}

    def resident_bytes(self) -> tuple[int, int]:
        """The resident set, and the part of it that is no mapped file."""
        memory = psutil.Process(self.pid).memory_info()
        return int(memory.rss), int(memory.rss - memory.shared)


def stop_servers_when_terminated() -> None:
    """Let SIGTERM unwind this process, so that no server outlives it."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def read_counters(text: str) -> dict[str, float]:
    """Values by name and labels from Prometheus' text format, buckets left out."""
    lines = [x for x in text.splitlines() if x and not x.startswith("#") and "_bucket{" not in x]
    pairs = [line.rsplit(" ", 1) for line in lines]
    return {name: float(value) for name, value in pairs}


def engine_flags(name: str, place: Place, model: str) -> list[str]:
    """Our server's flags for `bm25`, `faiss`, `faiss:FACTORY`, `torch` or `torch:DTYPE`.

    A dense name may end in `@DTYPE`, the encoder's.
    """
    name, _, encoder_dtype = name.partition("@")
    corpus = ["--corpus_path", str(place.corpus)]
    if name == "bm25":
        return ["--retriever_name", "bm25", *corpus, "--index_path", str(place.bm25)]
    engine, _, variant = name.partition(":")
    index = place.faiss(variant) if engine == "faiss" and variant else place.flat
    if index.parent.name.endswith(".index"):
        index = index.parent
    flags = ["--retriever_name", "minilm", "--retriever_model", model, *corpus]
    flags += ["--index_path", str(index), "--dense_engine", engine]
    flags += ["--encoder_dtype", encoder_dtype] if encoder_dtype else []
    return flags + (["--matrix_dtype", variant] if engine == "torch" and variant else [])


@contextmanager
def serving(name: str, place: Place, model: str, threads: int, *extra: str) -> Iterator[Running]:
    """Start the server called `name`, wait until it is healthy, stop it at the end.

    Its log is `<cache>/logs/<name>-<corpus>.log`.
    """
    log = place.cache / "logs" / f"{name.replace(':', '-')}-{place.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    if name in BASELINES:
        flags, module = _baseline_flags(name, place, model, threads), BASELINE
    else:
        flags, module = [*engine_flags(name, place, model), *extra], MODULE
    with LocalServer(flags, timeout=START_S, log_path=log, module=module) as server:
        yield Running(server.url, server.pid, time.perf_counter() - start)


def _baseline_flags(name: str, place: Place, model: str, threads: int) -> list[str]:
    flags = ["--corpus_path", str(place.corpus), "--index_file", str(place.flat)]
    flags += ["--model", model, "--threads", str(threads), "--cache", str(place.cache / "datasets")]
    return [*flags, "--concurrent"] if name.endswith("concurrent") else flags
