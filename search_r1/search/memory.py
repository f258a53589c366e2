"""Does it fit? The memory that settings need on each device, what is free, what a process holds.

Nothing is loaded to know it: sizes come from files and their headers.
"""

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from safetensors import SafetensorError, safe_open

from search_r1.search.backends.dense import locate_index, vectors_file
from search_r1.search.backends.flat_file import is_flat, read_shape
from search_r1.search.backends.registry import BACKENDS
from search_r1.search.corpus import OFFSETS
from search_r1.search.encoder import HashEncoder
from search_r1.search.errors import SetupError
from search_r1.search.settings import EncoderConfig, RetrieverConfig
from verl.machine import HostMemory, device_memory

logger = logging.getLogger(__name__)

OFFSET_BYTES = 8
"""Where a row of the corpus begins."""
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
"""Bytes of a value by dtype."""
QUERY_BLOCK = 256
"""Queries whose scores of a tile the torch backend holds at once."""


def format_bytes(count: float) -> str:
    """Bytes in a person's unit."""
    if count < 1e8:
        return f"{count / 1e6:.3g} MB"
    return f"{count / 1e9:.3g} GB" if count < 1e10 else f"{count / 1e9:.1f} GB"


def bytes_of_matrix(dtype: str, rows: int, dim: int) -> int:
    """Bytes of `rows` × `dim` values in `dtype`; int8 has a float32 scale per row as well."""
    return rows * (dim * item_bytes(dtype) + (4 if dtype == "int8" else 0))


def item_bytes(dtype: str) -> int:
    """Bytes of one value; raises SetupError for a dtype that no backend has."""
    if dtype not in ITEM_BYTES:
        raise SetupError(f"dtype {dtype!r}; expected {', '.join(ITEM_BYTES)}")
    return ITEM_BYTES[dtype]


def bytes_of_model(name: str, dtype: str) -> int | None:
    """Bytes of a model folder's weights in `dtype`, `.bin` as float32; None if it is not here."""
    folder = Path(name).expanduser()
    counts = [_num_values(path) for path in folder.rglob("*.safetensors")]
    counts = counts or [path.stat().st_size // 4 for path in folder.rglob("*.bin")]
    return sum(counts) * item_bytes(dtype) if counts else None


def _num_values(path: Path) -> int:
    """Values in a safetensors file, by its header alone."""
    try:
        with safe_open(path, framework="numpy") as file:
            names = list(file.keys())  # the file is no mapping: it has no iterator
            return sum(math.prod(file.get_slice(name).get_shape()) for name in names)
    except SafetensorError as error:
        raise SetupError(
            f"{path} is not a safetensors file ({error}); expected a whole one: fetch it again"
        ) from error


@dataclass(frozen=True)
class Host:
    """Free memory of a machine at one moment, in bytes."""

    free: int
    """Host memory, within the limit of the container."""
    gpus: tuple[int, ...] = ()
    """Free bytes of cuda:0, cuda:1 ..."""

    @classmethod
    def measure(cls, *, with_gpus: bool) -> "Host":
        """This machine now; `with_gpus` loads torch."""
        gpus = tuple(gpu.free for gpu in device_memory()) if with_gpus else ()
        return cls(HostMemory.now().free, gpus)


def resident() -> dict[str, int]:
    """Bytes that this process holds, and of files' pages that it maps, which others may share."""
    held = psutil.Process().memory_info()
    mapped = int(getattr(held, "shared", 0))  # only Linux tells
    return {"own": int(held.rss) - mapped, "mapped": mapped}


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

    @property
    def amount(self) -> str:
        """Its bytes in words, in brackets where they are optional."""
        text = "unknown" if self.bytes is None else format_bytes(self.bytes)
        return f"({text})" if self.optional else text


def check_memory(config: RetrieverConfig, host: Host | None = None) -> None:
    """Log what is needed and free on `host` (default: this machine); SetupError if too little."""
    host = host or Host.measure(with_gpus=needs_torch(config))
    needs = estimate(config, len(host.gpus))
    logger.info("memory needed and free:\n%s", table(needs, host))
    there = _devices(host)
    if absent := [n for n in needs if n.device.startswith("cuda") and n.device not in there]:
        raise SetupError(
            f"{absent[0].device}, for {absent[0].what}, does not exist here (there are "
            f"{', '.join(there)}); expected devices of this machine: leave --faiss_gpu out, or "
            "name others with --matrix_devices, --encoder_device or --reranker_device"
        )
    if short := _short(needs, host):
        raise SetupError(
            f"this machine is too small: {'; '.join(short)}; expected enough free memory: free "
            f"some, take a larger machine{_hints(_index_file(config))}"
        )


def needs_torch(config: RetrieverConfig) -> bool:
    """Whether anything that the settings name runs on torch or on GPUs."""
    in_torch = config.torch.dense_engine == "torch" or any(_model_names(config.encoder))
    return (
        (_is_dense(config) and in_torch)
        or config.faiss.faiss_gpu
        or config.rerank.reranker_model is not None
    )


def estimate(config: RetrieverConfig, num_gpus: int = 0) -> list[Need]:
    """All that will be loaded on a machine with `num_gpus`, but for files that are missing."""
    file = _index_file(config)
    index = _mapped_index(config) if file is None else _vectors(config, file, num_gpus)
    return [*index, *_models(config, num_gpus), *_documents(config, file)]


def table(needs: list[Need], host: Host) -> str:
    """One line per need and one per device, in GB (10⁹ bytes) or MB; optional ones in brackets."""
    lines = []
    for device, free in _devices(host).items():
        mine = [need for need in needs if need.device == device]
        lines += [f"  {device:8} {n.amount:>12}  {n.what}" for n in mine]
        lines.append(
            f"  {device:8} {format_bytes(_total(mine)):>12}  needed of {format_bytes(free)} free"
        )
    return "\n".join(lines)


def _model_names(encoder: EncoderConfig) -> list[str]:
    """The encoders that are models, unlike the one called `hash`."""
    names = dict.fromkeys((encoder.retriever_model, encoder.query_model))
    return [name for name in names if name and name.partition(":")[0] != HashEncoder.name]


def _is_dense(config: RetrieverConfig) -> bool:
    return config.retriever_name not in BACKENDS


def _index_file(config: RetrieverConfig) -> Path | None:
    """The FAISS file of a dense index, if it is there."""
    if not _is_dense(config) or config.index_path is None or not Path(config.index_path).exists():
        return None
    file = vectors_file(locate_index(config))
    return file if file.is_file() else None


def _mapped_index(config: RetrieverConfig) -> Iterator[Need]:
    """The files of a bm25 or Lucene index, which are mapped."""
    path = Path(config.index_path or "")
    if config.index_path is not None and path.is_dir() and not _is_dense(config):
        total = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        yield Need("cpu", "index (mapped files)", total, optional=True)


def _vectors(config: RetrieverConfig, file: Path, num_gpus: int) -> Iterator[Need]:
    """The vectors, where the dense backend puts them."""
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


def _models(config: RetrieverConfig, num_gpus: int) -> Iterator[Need]:
    """The weights of encoder and reranker."""
    encoder, rerank = config.encoder, config.rerank
    of_encoder = (encoder.encoder_device, encoder.encoder_dtype)
    names = _model_names(encoder) if _is_dense(config) else []
    models = [("encoder", name, *of_encoder) for name in names]
    if rerank.reranker_model is not None:
        of_reranker = (rerank.reranker_device, rerank.reranker_dtype)
        models.append(("reranker", rerank.reranker_model, *of_reranker))
    for what, name, device, dtype in models:
        device = _named(device or ("cuda:0" if num_gpus else "cpu"))
        yield Need(device, f"{what} {Path(name).name}", bytes_of_model(name, dtype))


def _documents(config: RetrieverConfig, file: Path | None) -> Iterator[Need]:
    """The corpus and where its rows begin, both mapped; `file`: of a dense index."""
    corpus = Path(config.corpus_path or "")
    if config.corpus_path is None or not corpus.is_file():
        return
    offsets = corpus.with_name(corpus.name + OFFSETS)
    if offsets.is_file():
        yield Need("cpu", "row offsets", offsets.stat().st_size)
    elif file is not None and is_flat(file):
        yield Need("cpu", "row offsets", read_shape(file)[0] * OFFSET_BYTES)
    else:
        yield Need("cpu", "row offsets (8 bytes a document)", None)
    yield Need("cpu", "documents (mapped file)", corpus.stat().st_size, optional=True)


def _devices(host: Host) -> dict[str, int]:
    return {"cpu": host.free} | {f"cuda:{i}": free for i, free in enumerate(host.gpus)}


def _total(needs: list[Need]) -> int:
    return sum(need.bytes or 0 for need in needs if not need.optional)


def _short(needs: list[Need], host: Host) -> list[str]:
    """A sentence per device that is too small."""
    free, sentences = _devices(host), []
    for device in dict.fromkeys(need.device for need in needs):
        mine = [n for n in needs if n.device == device and not n.optional]
        if device in free and _total(mine) > free[device]:
            parts = ", ".join(f"{n.what} {n.amount}" for n in mine)
            sentences.append(
                f"{device} needs {format_bytes(_total(mine))} ({parts}), "
                f"but {format_bytes(free[device])} is free"
            )
    return sentences


def _hints(file: Path | None) -> str:
    """What takes less memory: smaller values of a Flat index, and indexes that compress."""
    if file is None or not is_flat(file):
        return ""
    rows, dim, _ = read_shape(file)
    half = format_bytes(bytes_of_matrix("bfloat16", rows, dim))
    quarter = format_bytes(bytes_of_matrix("int8", rows, dim))
    return (
        f", use --dense_engine torch with --matrix_dtype bfloat16 ({half}) or int8 ({quarter}), "
        "more GPUs or --matrix_devices cpu, or build a smaller index with index_builder "
        "--faiss_type IVF4096,SQ8 or IVF4096,PQ64"
    )
