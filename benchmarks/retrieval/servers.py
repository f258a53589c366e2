"""Starts the compared servers as child processes: ours with its engines, and the baseline."""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import psutil

from benchmarks.retrieval.corpora import CorpusPaths
from search_r1.retrieval.local_server import MODULE, LocalServer

START_TIMEOUT_S = 600.0
BASELINES = ("baseline", "baseline-concurrent")
BASELINE_MODULE = "benchmarks.retrieval.baseline_server"


@dataclass(frozen=True)
class RunningServer:
    """A server that is ready for requests."""

    url: str
    pid: int
    start_seconds: float
    """Seconds from the start of the process to its first healthy response."""

    def cpu_seconds(self) -> float:
        """Return the processor time that the server has used so far."""
        times = psutil.Process(self.pid).cpu_times()
        return float(times.user + times.system)

    def counters(self) -> dict[str, float]:
        """Read the counters of `/metrics` by name and labels; empty for the baseline."""
        response = httpx.get(f"{self.url}/metrics", timeout=30.0, trust_env=False)
        return read_counters(response.text) if response.is_success else {}

    def resident_bytes(self) -> tuple[int, int]:
        """Return the bytes of the resident set, in total and without mapped files."""
        memory = psutil.Process(self.pid).memory_info()
        return int(memory.rss), int(memory.rss - memory.shared)


def stop_servers_when_terminated() -> None:
    """Let SIGTERM raise SystemExit in this process, so that its servers are stopped."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def read_counters(text: str) -> dict[str, float]:
    """Parse Prometheus' text format: values by name and labels, without buckets."""
    lines = [x for x in text.splitlines() if x and not x.startswith("#") and "_bucket{" not in x]
    pairs = [line.rsplit(" ", 1) for line in lines]
    return {name: float(value) for name, value in pairs}


def engine_flags(name: str, paths: CorpusPaths, model: str) -> list[str]:
    """Return our server's flags for `bm25`, `faiss[:FACTORY]` or `torch[:DTYPE]`.

    A dense name may end in `@DTYPE`, the dtype of the encoder.
    """
    name, _, encoder_dtype = name.partition("@")
    corpus = ["--corpus_path", str(paths.corpus)]
    if name == "bm25":
        return ["--retriever_name", "bm25", *corpus, "--index_path", str(paths.bm25)]
    engine, _, variant = name.partition(":")
    index = paths.faiss(variant) if engine == "faiss" and variant else paths.flat
    if index.parent.name.endswith(".index"):
        index = index.parent
    flags = ["--retriever_name", "minilm", "--retriever_model", model, *corpus]
    flags += ["--index_path", str(index), "--dense_engine", engine]
    flags += ["--encoder_dtype", encoder_dtype] if encoder_dtype else []
    return flags + (["--matrix_dtype", variant] if engine == "torch" and variant else [])


@contextmanager
def run_server(
    name: str, paths: CorpusPaths, model: str, threads: int, *extra: str
) -> Iterator[RunningServer]:
    """Start the server called `name`, yield it once it is healthy, and stop it at the end.

    Its log is `<cache>/logs/<name>-<corpus>.log`. `extra`: further flags of our server.
    """
    log = paths.cache / "logs" / f"{name.replace(':', '-')}-{paths.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    if name in BASELINES:
        flags, module = _baseline_flags(name, paths, model, threads), BASELINE_MODULE
    else:
        flags, module = [*engine_flags(name, paths, model), *extra], MODULE
    with LocalServer(flags, timeout=START_TIMEOUT_S, log_path=log, module=module) as server:
        yield RunningServer(server.url, server.pid, time.perf_counter() - began)


def _baseline_flags(name: str, paths: CorpusPaths, model: str, threads: int) -> list[str]:
    flags = ["--corpus_path", str(paths.corpus), "--index_file", str(paths.flat)]
    flags += ["--model", model, "--threads", str(threads), "--cache", str(paths.cache / "datasets")]
    return [*flags, "--concurrent"] if name.endswith("concurrent") else flags
