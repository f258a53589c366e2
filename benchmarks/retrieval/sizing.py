"""Extrapolates index sizes and rates measured here to wiki-18, and lists machines that fit."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import faiss

from benchmarks.retrieval.bench import Bench
from benchmarks.retrieval.corpora import CorpusPaths, build_faiss
from benchmarks.retrieval.figures import Figure, format_number
from search_r1.retrieval.corpus import Corpus
from search_r1.retrieval.engines.base import Retriever, collect
from search_r1.retrieval.engines.registry import build_retriever
from search_r1.retrieval.settings import EncoderConfig, RetrieverConfig, TorchConfig

ROWS, DIM = 21_015_324, 768
GPUS_GB = (24, 80, 141)
HOSTS_GB = (64, 128, 256)
GB = 1e9
GPU_RESERVE_GB = 2.0
"""Memory for a base-size encoder in half precision, CUDA itself, and one tile of scores."""
HOST_RESERVE_GB = 4.0
"""Memory for the encoder, Python and the system; documents are mapped and need none."""
VALUE_BYTES = {"": 4.0, "HNSW32": 4.0, "SQfp16": 2.0, "SQ8": 1.0}
"""Bytes of a value in a FAISS index, by factory string."""
SCANNED = (
    "faiss",
    "faiss:SQfp16",
    "faiss:SQ8",
    "torch",
    "torch:float16",
    "torch:bfloat16",
    "torch:int8",
)
"""Engines that scan all vectors, so that their rate can be extrapolated to more vectors."""
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
"""Bytes of a value of the torch backend; int8 has an additional float32 scale per row."""
NUM_TIMED = 64
"""Queries of a timed search, as 64 clients send them together."""


@dataclass(frozen=True)
class IndexSize:
    """Memory of an index type: bytes per value, and a measured overhead per vector."""

    name: str
    value_bytes: float
    overhead: float
    """Bytes per vector in addition to its values: links, scales, ids."""
    measured_dim: int
    has_gpu: bool = False

    def bytes_per_vector(self, dim: int) -> float:
        """Return the bytes of a vector of `dim` values."""
        return self.value_bytes * dim + self.overhead


def index_size(
    name: str, total_bytes: float, rows: int, dim: int, value_bytes: float, *, has_gpu: bool = False
) -> IndexSize:
    """Derive the overhead from an index of `rows` × `dim` that takes `total_bytes`."""
    return IndexSize(name, value_bytes, total_bytes / rows - value_bytes * dim, dim, has_gpu)


def index_sizes(paths: CorpusPaths) -> dict[str, IndexSize]:
    """Return the size of every engine's index; FAISS files are built if they are missing."""
    flat = faiss.read_index(str(paths.flat), faiss.IO_FLAG_MMAP_IFC)
    rows, dim = flat.ntotal, flat.d
    sizes = {}
    for factory, value_bytes in VALUE_BYTES.items():
        file = build_faiss(paths, factory) if factory else paths.flat
        name = f"faiss:{factory}" if factory else "faiss"
        sizes[name] = index_size(name, file.stat().st_size, rows, dim, value_bytes)
    for dtype, item_bytes in ITEM_BYTES.items():
        name = "torch" if dtype == "float32" else f"torch:{dtype}"
        total_bytes = rows * (dim * item_bytes + (4 if dtype == "int8" else 0))
        sizes[name] = index_size(name, total_bytes, rows, dim, item_bytes, has_gpu=True)
    return sizes


def fitting_sizes(need_gb: float, sizes_gb: Sequence[int], reserve_gb: float) -> list[int]:
    """Return the memory sizes (GB) that fit `need_gb` and the reserve."""
    return [size for size in sizes_gb if need_gb + reserve_gb <= size]


def extrapolate_rate(rate: float, rows: int, dim: int) -> float:
    """Return the queries/s of a scan of ROWS × DIM, given the rate for `rows` × `dim`."""
    return rate * rows * dim / (ROWS * DIM)


def sizing(bench: Bench, corpus: str) -> list[Figure]:
    """Return for each engine the memory of wiki-18, the machines that fit, and the rate here."""
    figures = [_bm25_figure(bench.paths(corpus))]
    for name, size in index_sizes(bench.paths("44k")).items():
        need = size.bytes_per_vector(DIM) * ROWS / GB
        rate = _wiki_rate(bench, name, corpus) if name in SCANNED else None
        figures.append(
            Figure(f"{name}: 21,015,324 × 768", need, "GB", note=_note(size, need, rate))
        )
    return figures


def _note(size: IndexSize, need: float, rate: float | None) -> str:
    """Describe the machines that fit, and the rate on this machine."""
    parts = [f"hosts of {_join(fitting_sizes(need, HOSTS_GB, HOST_RESERVE_GB))}"]
    if size.has_gpu:
        parts.insert(0, f"GPUs of {_join(fitting_sizes(need, GPUS_GB, GPU_RESERVE_GB))}")
    if rate is not None:
        parts.append(f"{format_number(rate)} queries/s on this machine")
    return "; ".join(parts)


def _join(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes)) + " GB" if sizes else "none of these sizes"


def _bm25_figure(paths: CorpusPaths) -> Figure:
    """Return the size of the BM25 index, extrapolated in proportion to the passages."""
    size = sum(path.stat().st_size for path in paths.bm25.iterdir())
    need = size / len(Corpus.open(paths.corpus)) * ROWS / GB
    fits = _join(fitting_sizes(need, HOSTS_GB, HOST_RESERVE_GB))
    return Figure("bm25: 21,015,324 passages", need, "GB", note=f"mapped; hosts of {fits}")


def _wiki_rate(bench: Bench, name: str, corpus: str) -> float:
    """Time a search and extrapolate its queries/s to wiki-18.

    Searches `corpus`, or the 44 thousand passages for FAISS's quantized indexes.
    """
    paths = bench.paths("44k" if name.startswith("faiss:") else corpus)
    engine, _, variant = name.partition(":")
    index = paths.faiss(variant) if engine == "faiss" and variant else paths.flat
    matrix = TorchConfig(dense_engine=engine, matrix_dtype=variant or "float32")
    config = RetrieverConfig(
        "minilm",
        str(paths.corpus),
        str(index),
        encoder=EncoderConfig(bench.model),
        torch=matrix if engine == "torch" else TorchConfig(),
    )
    retriever = build_retriever(config)
    seconds = list(_search_seconds(retriever, bench.questions[: 3 * NUM_TIMED], bench.topk))
    dim = int(faiss.read_index(str(paths.flat), faiss.IO_FLAG_MMAP_IFC).d)
    return extrapolate_rate(NUM_TIMED / min(seconds), retriever.num_documents, dim)


def _search_seconds(retriever: Retriever, queries: Sequence[str], k: int) -> Iterator[float]:
    """Yield the seconds of the search stage alone, for batches of NUM_TIMED queries."""
    for start in range(0, len(queries), NUM_TIMED):
        with collect() as seconds:
            began = time.perf_counter()
            retriever.search(queries[start : start + NUM_TIMED], k)
            total = time.perf_counter() - began
        yield seconds.get("search", total)
