"""Does it fit? The memory that the settings need on each device against what is free.

Nothing is loaded to know it: sizes come from files and their headers.
"""

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from search_r1.search.backends.dense import locate_index, vectors_file
from search_r1.search.backends.flat_file import is_flat, read_shape
from search_r1.search.backends.registry import BACKENDS
from search_r1.search.backends.settings import RetrieverConfig
from search_r1.search.errors import SetupError
from search_r1.search.memory import QUERY_BLOCK, Host, bytes_of_matrix, bytes_of_model

logger = logging.getLogger(__name__)

GB, MB = 1e9, 1e6
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
    """A mapped file: it serves without this memory too, from disk."""


def check(config: RetrieverConfig, host: Host | None = None) -> None:
    """Log what is needed and what is free; raise SetupError if it does not fit.

    `host`: the machine to judge; default: this one, now.
    """
    host = host or Host.measure(with_gpus=needs_torch(config))
    needs = estimate(config, len(host.gpus))
    logger.info("memory needed and free:\n%s", table(needs, host))
    if short := _short(needs, host):
        raise SetupError(
            f"this machine is too small: {'; '.join(short)}; expected enough free memory: free "
            f"some, take a larger machine{_hints(config)}"
        )


def needs_torch(config: RetrieverConfig) -> bool:
    """Whether anything that the settings name runs on torch or on GPUs."""
    names = {config.encoder.retriever_model, config.encoder.query_model} - {None}
    in_torch = config.torch.dense_engine == "torch" or not all(map(_is_hash, names))
    return (
        (_is_dense(config) and in_torch)
        or config.faiss.faiss_gpu
        or config.rerank.reranker_model is not None
    )


def estimate(config: RetrieverConfig, num_gpus: int = 0) -> list[Need]:
    """Everything that the settings will load, on a machine with `num_gpus`.

    Files that are missing are left out: opening them says what to do.
    """
    index = _vectors(config, num_gpus) if _is_dense(config) else _mapped_index(config)
    return [*index, *_models(config, num_gpus), *_documents(config)]


def table(needs: list[Need], host: Host) -> str:
    """One line per need and one per device, in GB (10⁹ bytes) or MB; optional ones in brackets."""
    lines = []
    for device, free in _devices(host).items():
        mine = [need for need in needs if need.device == device]
        lines += [f"  {device:8} {_amount(n):>12}  {n.what}" for n in mine]
        lines.append(f"  {device:8} {_gb(_total(mine)):>12}  needed of {_gb(free)} free")
    return "\n".join(lines)


def _is_hash(name: str | None) -> bool:
    """Whether an encoder's name stands for the one without a model."""
    return name is not None and name.partition(":")[0] == "hash"


def _is_dense(config: RetrieverConfig) -> bool:
    return config.retriever_name not in BACKENDS


def _index_file(config: RetrieverConfig) -> Path | None:
    """The FAISS file of a dense index, if it is there."""
    if config.index_path is None or not Path(config.index_path).exists():
        return None
    file = vectors_file(locate_index(config))
    return file if file.is_file() else None


def _vectors(config: RetrieverConfig, num_gpus: int) -> Iterator[Need]:
    """The vectors, where the dense backend puts them."""
    file = _index_file(config)
    if file is None:
        return
    if config.torch.dense_engine == "torch":
        yield from _matrix(config, file, num_gpus)
    elif config.faiss.faiss_gpu:
        # a Flat index goes to GPUs in float16, others as they are stored
        on_gpus = bytes_of_matrix("float16", *read_shape(file)[:2]) if is_flat(file) else None
        share = math.ceil((on_gpus or file.stat().st_size) / max(1, num_gpus))
        for i in range(max(1, num_gpus)):
            yield Need(f"cuda:{i}", "index shard (float16)", share)
    else:
        yield Need("cpu", "index (FAISS)", file.stat().st_size)


def _matrix(config: RetrieverConfig, file: Path, num_gpus: int) -> Iterator[Need]:
    """The torch backend's matrix in equal shards, and its room for one tile."""
    rows, dim, _ = read_shape(file)
    dtype, tile = config.torch.matrix_dtype, min(config.torch.tile_rows, rows)
    devices = [_named(device) for device in config.torch.matrix_devices]
    devices = devices or [f"cuda:{i}" for i in range(num_gpus)] or ["cpu"]
    total = bytes_of_matrix(dtype, rows, dim)
    for device in dict.fromkeys(devices):
        count = devices.count(device)
        yield Need(device, f"matrix ({dtype})", math.ceil(total * count / len(devices)))
        yield Need(device, "scores of a tile", tile * (4 * dim + 8 * QUERY_BLOCK) * count)
    if "cpu" not in devices:
        yield Need("cpu", "a tile while loading", tile * dim * 4)


def _named(device: str) -> str:
    return "cuda:0" if device == "cuda" else device


def _mapped_index(config: RetrieverConfig) -> Iterator[Need]:
    """The files of a bm25 or Lucene index, which are mapped."""
    path = Path(config.index_path or "")
    if config.index_path is not None and path.is_dir():
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        yield Need("cpu", "index (mapped files)", size, optional=True)


def _models(config: RetrieverConfig, num_gpus: int) -> Iterator[Need]:
    """The weights of encoder and reranker."""
    default = "cuda:0" if num_gpus else "cpu"
    encoder, rerank = config.encoder, config.rerank
    if _is_dense(config):
        device = _named(encoder.encoder_device or default)
        for name in dict.fromkeys((encoder.retriever_model, encoder.query_model)):
            if name is not None and not _is_hash(name):
                size = bytes_of_model(name, encoder.encoder_dtype)
                yield Need(device, f"encoder {Path(name).name}", size)
    if (name := rerank.reranker_model) is not None:
        size = bytes_of_model(name, rerank.reranker_dtype)
        yield Need(_named(rerank.reranker_device or default), f"reranker {Path(name).name}", size)


def _documents(config: RetrieverConfig) -> Iterator[Need]:
    """The corpus and where its rows begin, both mapped."""
    corpus = Path(config.corpus_path or "")
    if config.corpus_path is None or not corpus.is_file():
        return
    offsets = corpus.with_name(corpus.name + ".offsets.npy")
    if offsets.is_file():
        yield Need("cpu", "row offsets", offsets.stat().st_size)
    elif _is_dense(config) and (file := _index_file(config)) is not None and is_flat(file):
        yield Need("cpu", "row offsets", read_shape(file)[0] * OFFSET_BYTES)
    else:
        yield Need("cpu", "row offsets (8 bytes a document)", None)
    yield Need("cpu", "documents (mapped file)", corpus.stat().st_size, optional=True)


def _devices(host: Host) -> dict[str, int]:
    return {"cpu": host.free} | {f"cuda:{i}": free for i, free in enumerate(host.gpus)}


def _total(needs: list[Need]) -> int:
    return sum(need.bytes or 0 for need in needs if not need.optional)


def _gb(count: float) -> str:
    if count < GB / 10:
        return f"{count / MB:.3g} MB"
    return f"{count / GB:.3g} GB" if count < 10 * GB else f"{count / GB:.1f} GB"


def _amount(need: Need) -> str:
    amount = "unknown" if need.bytes is None else _gb(need.bytes)
    return f"({amount})" if need.optional else amount


def _short(needs: list[Need], host: Host) -> list[str]:
    """A sentence per device that is too small; devices that do not exist are too."""
    free, sentences = _devices(host), []
    for device in dict.fromkeys(need.device for need in needs):
        mine = [n for n in needs if n.device == device and not n.optional]
        if device not in free and device.startswith("cuda"):
            sentences.append(f"{device} does not exist here (there are {', '.join(free)})")
        elif device in free and _total(mine) > free[device]:
            parts = ", ".join(f"{n.what} {_amount(n)}" for n in mine)
            sentences.append(
                f"{device} needs {_gb(_total(mine))} ({parts}), but {_gb(free[device])} is free"
            )
    return sentences


def _hints(config: RetrieverConfig) -> str:
    """What takes less memory: smaller values of a Flat index, and indexes that compress."""
    file = _index_file(config) if _is_dense(config) else None
    if file is None or not is_flat(file):
        return ""
    rows, dim, _ = read_shape(file)
    sizes = {dtype: _gb(bytes_of_matrix(dtype, rows, dim)) for dtype in ("bfloat16", "int8")}
    return (
        f", use --dense_engine torch with --matrix_dtype bfloat16 ({sizes['bfloat16']}) or int8 "
        f"({sizes['int8']}), more GPUs or --matrix_devices cpu, or build a smaller index with "
        "index_builder --faiss_type IVF4096,SQ8 or IVF4096,PQ64"
    )
