"""What an engine's settings will load, and the bytes of each thing on each device.

Nothing is loaded to know it: sizes come from files' headers and the formulas of `memory`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from search_r1.search.backends.flat_file import is_flat, read_shape
from search_r1.search.backends.registry import ENGINES
from search_r1.search.backends.settings import RetrieverConfig, TorchConfig
from search_r1.search.backends.vector_index import locate_index, vectors_file
from search_r1.search.memory import QUERY_BLOCK, bytes_of_index, bytes_of_model

OFFSET_BYTES = 8


@dataclass(frozen=True)
class Need:
    """Memory that one thing takes on one device."""

    device: str
    """`cpu`, `cuda:0` ..."""
    what: str
    bytes: int | None
    """None where nobody can know before it is there."""
    optional: bool = False
    """A file by memory map: it serves without this memory too, from disk."""


def needs_torch(config: RetrieverConfig) -> bool:
    """Whether anything that the settings name runs on torch or on GPUs."""
    names = {config.encoder.retriever_model, config.encoder.query_model} - {None}
    has_model = is_dense(config) and not all(map(is_hash, names))
    has_matrix = is_dense(config) and config.torch.dense_engine == "torch"
    return (
        has_model
        or has_matrix
        or config.faiss.faiss_gpu
        or config.rerank.reranker_model is not None
    )


def is_hash(name: str | None) -> bool:
    """Whether an encoder's name stands for the one without a model."""
    return name is not None and name.partition(":")[0] == "hash"


def is_dense(config: RetrieverConfig) -> bool:
    """Whether the settings name a dense index."""
    return config.retriever_name not in ENGINES


def estimate(config: RetrieverConfig, num_gpus: int = 0) -> list[Need]:
    """Everything that the settings will load, on a machine with `num_gpus`.

    Files that are missing are left out: opening them says what to do.
    """
    needs = list(_index(config, num_gpus)) if is_dense(config) else list(_mapped_index(config))
    return needs + list(_models(config, num_gpus)) + list(_documents(config))


def index_file(config: RetrieverConfig) -> Path | None:
    """The FAISS file of a dense index, if it is there."""
    if config.index_path is None or not Path(config.index_path).exists():
        return None
    file = vectors_file(locate_index(config))
    return file if file.is_file() else None


def _index(config: RetrieverConfig, num_gpus: int) -> Iterator[Need]:
    """The vectors, where the dense engine puts them."""
    file = index_file(config)
    if file is None:
        return
    if config.torch.dense_engine == "torch":
        rows, dim, _ = read_shape(file)
        yield from _matrix(config.torch, rows, dim, num_gpus)
    elif config.faiss.faiss_gpu:
        for i in range(max(1, num_gpus)):
            each = math.ceil(_faiss_on_gpus(file) / max(1, num_gpus))
            yield Need(f"cuda:{i}", "index shard (float16)", each)
    else:
        yield Need("cpu", "index (FAISS)", file.stat().st_size)


def _faiss_on_gpus(file: Path) -> int:
    """Bytes of an index on all GPUs together: a Flat one in float16, others as they are stored."""
    if not is_flat(file):
        return file.stat().st_size
    rows, dim, _ = read_shape(file)
    return bytes_of_index("faiss_gpu", "float16", rows, dim)


def _matrix(torch: TorchConfig, rows: int, dim: int, num_gpus: int) -> Iterator[Need]:
    """The torch engine's matrix in equal shards, and its room for one tile."""
    devices = [_named(d) for d in torch.matrix_devices]
    devices = devices or [f"cuda:{i}" for i in range(num_gpus)] or ["cpu"]
    total = bytes_of_index("torch", torch.matrix_dtype, rows, dim)
    tile = min(torch.tile_rows, rows)
    for device in dict.fromkeys(devices):
        share = math.ceil(total * devices.count(device) / len(devices))
        yield Need(device, f"matrix ({torch.matrix_dtype})", share)
        scores = tile * (4 * dim + 8 * QUERY_BLOCK) * devices.count(device)
        yield Need(device, "scores of a tile", scores)
    if "cpu" not in devices:
        yield Need("cpu", "a tile while loading", tile * dim * 4)


def _named(device: str) -> str:
    return "cuda:0" if device == "cuda" else device


def _mapped_index(config: RetrieverConfig) -> Iterator[Need]:
    """The files of a bm25 or Lucene index, which are read by memory map."""
    path = Path(config.index_path or "")
    if config.index_path is not None and path.is_dir():
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        yield Need("cpu", "index (mapped files)", size, optional=True)


def _models(config: RetrieverConfig, num_gpus: int) -> Iterator[Need]:
    """The weights of encoder and reranker."""
    default = "cuda:0" if num_gpus else "cpu"
    encoder, rerank = config.encoder, config.rerank
    if is_dense(config):
        device = _named(encoder.encoder_device or default)
        for name in dict.fromkeys((encoder.retriever_model, encoder.query_model)):
            if name is not None and not is_hash(name):
                size = bytes_of_model(name, encoder.encoder_dtype)
                yield Need(device, f"encoder {Path(name).name}", size)
    if (name := rerank.reranker_model) is not None:
        size = bytes_of_model(name, rerank.reranker_dtype)
        yield Need(_named(rerank.reranker_device or default), f"reranker {Path(name).name}", size)


def _documents(config: RetrieverConfig) -> Iterator[Need]:
    """The corpus and where its rows begin, both by memory map."""
    corpus = Path(config.corpus_path or "")
    if config.corpus_path is None or not corpus.is_file():
        return
    offsets = corpus.with_name(corpus.name + ".offsets.npy")
    if offsets.is_file():
        yield Need("cpu", "row offsets", offsets.stat().st_size)
    elif (file := index_file(config)) is not None and is_dense(config) and is_flat(file):
        yield Need("cpu", "row offsets", read_shape(file)[0] * OFFSET_BYTES)
    else:
        yield Need("cpu", "row offsets (8 bytes a document)", None)
    yield Need("cpu", "documents (mapped file)", corpus.stat().st_size, optional=True)
