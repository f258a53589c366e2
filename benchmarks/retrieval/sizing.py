"""Which engine fits which machine: bytes and rates measured here, carried to wiki-18's size."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import faiss

from benchmarks.retrieval.bench import Bench
from benchmarks.retrieval.corpora import Place, build_faiss
from benchmarks.retrieval.figures import Figure, number
from search_r1.search.backends.base import Retriever, collect
from search_r1.search.backends.registry import build_retriever
from search_r1.search.corpus import Corpus
from search_r1.search.memory import ITEM_BYTES, bytes_of_matrix
from search_r1.search.settings import EncoderConfig, RetrieverConfig, TorchConfig

ROWS, DIM = 21_015_324, 768
GPUS_GB = (24, 80, 141)
HOSTS_GB = (64, 128, 256)
GB = 1e9
GPU_RESERVE_GB = 2.0
"""For a base-size encoder in half precision, CUDA itself, and one tile of scores."""
HOST_RESERVE_GB = 4.0
"""For the encoder, Python and the system; documents are mapped and need no memory of their own."""
VALUE_BYTES = {"": 4.0, "HNSW32": 4.0, "SQfp16": 2.0, "SQ8": 1.0}
"""Bytes of a value in a FAISS index by factory string."""
SCANNED = (
    "faiss",
    "faiss:SQfp16",
    "faiss:SQ8",
    "torch",
    "torch:float16",
    "torch:bfloat16",
    "torch:int8",
)
"""Engines whose time grows with the number of vectors, so that a rate can be carried over."""
NUM_TIMED = 64
"""Queries of a timed search: what 64 clients bring at once."""


@dataclass(frozen=True)
class Kind:
    """A way to hold vectors: bytes per value, and what was measured beyond them."""

    name: str
    value_bytes: float
    overhead: float
    """Bytes per vector beyond its values: links, scales, ids."""
    measured_dim: int
    has_gpu: bool = False

    def bytes_per_vector(self, dim: int) -> float:
        """Bytes of a vector of `dim` values."""
        return self.value_bytes * dim + self.overhead


def kind_of(
    name: str, total_bytes: float, rows: int, dim: int, value_bytes: float, *, has_gpu: bool = False
) -> Kind:
    """The kind whose index of `rows` × `dim` takes `total_bytes`."""
    return Kind(name, value_bytes, total_bytes / rows - value_bytes * dim, dim, has_gpu)


def measured_kinds(place: Place) -> dict[str, Kind]:
    """Every engine's kind: FAISS from its files, built where missing, torch from its matrix."""
    flat = faiss.read_index(str(place.flat), faiss.IO_FLAG_MMAP_IFC)
    rows, dim = flat.ntotal, flat.d
    kinds = {}
    for factory, value_bytes in VALUE_BYTES.items():
        file = build_faiss(place, factory) if factory else place.flat
        name = f"faiss:{factory}" if factory else "faiss"
        kinds[name] = kind_of(name, file.stat().st_size, rows, dim, value_bytes)
    for dtype, item in ITEM_BYTES.items():
        name = "torch" if dtype == "float32" else f"torch:{dtype}"
        total = bytes_of_matrix(dtype, rows, dim)
        kinds[name] = kind_of(name, total, rows, dim, item, has_gpu=True)
    return kinds


def fitting(need_gb: float, sizes_gb: Sequence[int], reserve_gb: float) -> list[int]:
    """The sizes (GB) that hold `need_gb` beside the reserve."""
    return [size for size in sizes_gb if need_gb + reserve_gb <= size]


def carried_rate(rate: float, rows: int, dim: int) -> float:
    """Queries/s of a scan over ROWS × DIM, given the rate over `rows` × `dim`."""
    return rate * rows * dim / (ROWS * DIM)


def sizing(bench: Bench, corpus: str) -> list[Figure]:
    """Memory of 21 million × 768 by engine, the machines that hold it, and the rate here."""
    kinds = measured_kinds(bench.place("44k"))
    figures = [_bm25_figure(bench.place(corpus))]
    for name, kind in kinds.items():
        need = kind.bytes_per_vector(DIM) * ROWS / GB
        rate = _carried(bench, name, corpus) if name in SCANNED else None
        figures.append(
            Figure(f"{name}: 21,015,324 × 768", need, "GB", note=_note(kind, need, rate))
        )
    return figures


def _note(kind: Kind, need: float, rate: float | None) -> str:
    """Where it fits, and how fast it is here."""
    parts = [f"hosts of {_sizes(fitting(need, HOSTS_GB, HOST_RESERVE_GB))}"]
    if kind.has_gpu:
        parts.insert(0, f"GPUs of {_sizes(fitting(need, GPUS_GB, GPU_RESERVE_GB))}")
    if rate is not None:
        parts.append(f"{number(rate)} queries/s on this machine")
    return "; ".join(parts)


def _sizes(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes)) + " GB" if sizes else "none of these sizes"


def _bm25_figure(place: Place) -> Figure:
    """The BM25 index, grown in proportion to the passages."""
    size = sum(path.stat().st_size for path in place.bm25.iterdir())
    need = size / len(Corpus.open(place.corpus)) * ROWS / GB
    fits = _sizes(fitting(need, HOSTS_GB, HOST_RESERVE_GB))
    return Figure("bm25: 21,015,324 passages", need, "GB", note=f"mapped; hosts of {fits}")


def _carried(bench: Bench, name: str, corpus: str) -> float:
    """Queries/s over wiki-18 from a timed search: on 1 million vectors, or 44 thousand for SQ."""
    place = bench.place("44k" if name.startswith("faiss:") else corpus)
    engine, _, variant = name.partition(":")
    index = place.faiss(variant) if engine == "faiss" and variant else place.flat
    matrix = TorchConfig(dense_engine=engine, matrix_dtype=variant or "float32")
    config = RetrieverConfig(
        "minilm",
        str(place.corpus),
        str(index),
        encoder=EncoderConfig(bench.model),
        torch=matrix if engine == "torch" else TorchConfig(),
    )
    retriever = build_retriever(config)
    seconds = list(_search_seconds(retriever, bench.questions[: 3 * NUM_TIMED], bench.topk))
    rows = retriever.num_documents
    return carried_rate(NUM_TIMED / min(seconds), rows, _dim(place))


def _search_seconds(retriever: Retriever, queries: Sequence[str], k: int) -> Iterator[float]:
    """Seconds of the search stage alone, batch by batch."""
    for start in range(0, len(queries), NUM_TIMED):
        with collect() as seconds:
            begin = time.perf_counter()
            retriever.search(queries[start : start + NUM_TIMED], k)
            whole = time.perf_counter() - begin
        yield seconds.get("search", whole)


def _dim(place: Place) -> int:
    return int(faiss.read_index(str(place.flat), faiss.IO_FLAG_MMAP_IFC).d)
