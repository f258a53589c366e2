"""Estimates the memory that a server needs on each device, and compares it with what is free.

Nothing is loaded for this: sizes come from files and their headers.
"""

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from safetensors import SafetensorError, safe_open

from search_r1.retrieval.corpus import OFFSETS
from search_r1.retrieval.encoder import HashEncoder
from search_r1.retrieval.engines.dense import locate_index, vectors_file
from search_r1.retrieval.engines.flat_file import is_flat, read_shape
from search_r1.retrieval.engines.registry import BACKENDS
from search_r1.retrieval.errors import SetupError
from search_r1.retrieval.settings import EncoderConfig, RetrieverConfig
from verl.machine import HostMemory, device_memory

logger = logging.getLogger(__name__)

OFFSET_BYTES = 8
"""Bytes of a row offset of the corpus."""
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
QUERY_BLOCK = 256
"""Queries that the torch backend scores against a tile at once."""


def format_bytes(count: float) -> str:
    """Format a number of bytes in MB or GB (10⁹ bytes)."""
    if count < 1e8:
        return f"{count / 1e6:.3g} MB"
    return f"{count / 1e9:.3g} GB" if count < 1e10 else f"{count / 1e9:.1f} GB"


def bytes_of_matrix(dtype: str, rows: int, dim: int) -> int:
    """Return the bytes of a (rows, dim) matrix; int8 has an additional float32 scale per row."""
    return rows * (dim * item_bytes(dtype) + (4 if dtype == "int8" else 0))


def item_bytes(dtype: str) -> int:
    """Return the bytes of one value; raises SetupError for a dtype that no backend supports."""
    if dtype not in ITEM_BYTES:
        raise SetupError(f"dtype {dtype!r}; expected {', '.join(ITEM_BYTES)}")
    return ITEM_BYTES[dtype]


def bytes_of_model(name: str, dtype: str) -> int | None:
    """Return the bytes of a model's weights in `dtype`; None if the model is not a local folder."""
    folder = Path(name).expanduser()
    counts = [_num_values(path) for path in folder.rglob("*.safetensors")]
    if not counts:  # `.bin` files have no header: assume float32
        counts = [path.stat().st_size // 4 for path in folder.rglob("*.bin")]
    return sum(counts) * item_bytes(dtype) if counts else None


def _num_values(path: Path) -> int:
    """Return the number of values in a safetensors file, read from its header."""
    try:
        with safe_open(path, framework="numpy") as file:
            names = list(file.keys())  # the file itself is not iterable
            return sum(math.prod(file.get_slice(name).get_shape()) for name in names)
    except SafetensorError as error:
        raise SetupError(
            f"{path} is not a safetensors file ({error}); expected a complete one: fetch it again"
        ) from error


@dataclass(frozen=True)
class Host:
    """Free memory of a machine in bytes."""

    free: int
    """Free host memory within the limit of the container."""
    gpus: tuple[int, ...] = ()
    """Free memory of cuda:0, cuda:1 ..."""

    @classmethod
    def measure(cls, *, with_gpus: bool) -> "Host":
        """Measure this machine; `with_gpus` loads torch."""
        gpus = tuple(gpu.free for gpu in device_memory()) if with_gpus else ()
        return cls(HostMemory.now().free, gpus)


def resident() -> dict[str, int]:
    """Return the bytes of this process's own memory and of its mapped files (shareable pages)."""
    info = psutil.Process().memory_info()
    mapped = int(getattr(info, "shared", 0))  # reported on Linux only
    return {"own": int(info.rss) - mapped, "mapped": mapped}


@dataclass(frozen=True)
class MemoryNeed:
    """Memory that one component needs on one device."""

    device: str
    """`cpu`, `cuda:0` ..."""
    what: str
    bytes: int | None
    """None if unknown before it is loaded or downloaded."""
    optional: bool = False
    """Whether it is a mapped file, which the server can also read from disk."""

    @property
    def amount(self) -> str:
        text = "unknown" if self.bytes is None else format_bytes(self.bytes)
        return f"({text})" if self.optional else text


def check_memory(config: RetrieverConfig, host: Host | None = None) -> None:
    """Log needed and free memory of `host` (None: this machine); raises SetupError if short."""
    host = host or Host.measure(with_gpus=needs_torch(config))
    needs = estimate(config, len(host.gpus))
    logger.info("memory needed and free:\n%s", table(needs, host))
    devices = _devices(host)
    if missing := [n for n in needs if n.device.startswith("cuda") and n.device not in devices]:
        raise SetupError(
            f"{missing[0].device}, for {missing[0].what}, does not exist here (there are "
            f"{', '.join(devices)}); expected devices of this machine: leave --faiss_gpu out, or "
            "name others with --matrix_devices, --encoder_device or --reranker_device"
        )
    if shortages := _shortages(needs, host):
        raise SetupError(
            f"this machine is too small: {'; '.join(shortages)}; expected enough free memory: free "
            f"some, use a larger machine{_hints(_index_file(config))}"
        )


def needs_torch(config: RetrieverConfig) -> bool:
    """Whether any configured component uses torch or GPUs."""
    uses_torch = config.torch.dense_engine == "torch" or any(_model_names(config.encoder))
    return (
        (_is_dense(config) and uses_torch)
        or config.faiss.faiss_gpu
        or config.rerank.reranker_model is not None
    )


def estimate(config: RetrieverConfig, num_gpus: int = 0) -> list[MemoryNeed]:
    """Return the memory needs on a machine with `num_gpus`; missing files are left out."""
    file = _index_file(config)
    index = _mapped_index(config) if file is None else _vectors(config, file, num_gpus)
    return [*index, *_models(config, num_gpus), *_documents(config, file)]


def table(needs: list[MemoryNeed], host: Host) -> str:
    """Format the needs, one line each, and the total and free memory of each device."""
    lines = []
    for device, free in _devices(host).items():
        on_device = [need for need in needs if need.device == device]
        lines += [f"  {device:8} {n.amount:>12}  {n.what}" for n in on_device]
        total = format_bytes(_total(on_device))
        lines.append(f"  {device:8} {total:>12}  needed of {format_bytes(free)} free")
    return "\n".join(lines)


def _model_names(encoder: EncoderConfig) -> list[str]:
    """Return the encoder models, without the built-in encoder `hash`."""
    names = dict.fromkeys((encoder.retriever_model, encoder.query_model))
    return [name for name in names if name and name.partition(":")[0] != HashEncoder.name]


def _is_dense(config: RetrieverConfig) -> bool:
    return config.retriever_name not in BACKENDS


def _index_file(config: RetrieverConfig) -> Path | None:
    """Return the FAISS file of a dense index, or None if it does not exist."""
    if not _is_dense(config) or config.index_path is None or not Path(config.index_path).exists():
        return None
    file = vectors_file(locate_index(config))
    return file if file.is_file() else None


def _mapped_index(config: RetrieverConfig) -> Iterator[MemoryNeed]:
    path = Path(config.index_path or "")
    if config.index_path is not None and path.is_dir() and not _is_dense(config):
        total = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        yield MemoryNeed("cpu", "index (mapped files)", total, optional=True)


def _vectors(config: RetrieverConfig, file: Path, num_gpus: int) -> Iterator[MemoryNeed]:
    """Yield the vectors on the devices where the dense backend loads them."""
    if config.torch.dense_engine == "torch":
        yield from _matrix(config, file, num_gpus)
    elif config.faiss.faiss_gpu:
        # FAISS copies a Flat index to GPUs in float16, other kinds as they are stored.
        on_gpus = bytes_of_matrix("float16", *read_shape(file)[:2]) if is_flat(file) else None
        share = math.ceil((on_gpus or file.stat().st_size) / max(1, num_gpus))
        for i in range(max(1, num_gpus)):
            yield MemoryNeed(f"cuda:{i}", "index shard (float16)", share)
    else:
        yield MemoryNeed("cpu", "index (FAISS)", file.stat().st_size)


def _matrix(config: RetrieverConfig, file: Path, num_gpus: int) -> Iterator[MemoryNeed]:
    """Yield the torch backend's matrix in equal shards, and a tile with its scores."""
    rows, dim, _ = read_shape(file)
    dtype, tile = config.torch.matrix_dtype, min(config.torch.tile_rows, rows)
    devices = [_with_index(device) for device in config.torch.matrix_devices]
    devices = devices or [f"cuda:{i}" for i in range(num_gpus)] or ["cpu"]
    total = bytes_of_matrix(dtype, rows, dim)
    for device in dict.fromkeys(devices):
        count = devices.count(device)
        yield MemoryNeed(device, f"matrix ({dtype})", math.ceil(total * count / len(devices)))
        yield MemoryNeed(device, "scores of a tile", tile * (4 * dim + 8 * QUERY_BLOCK) * count)
    if "cpu" not in devices:
        yield MemoryNeed("cpu", "a tile while loading", tile * dim * 4)


def _with_index(device: str) -> str:
    return "cuda:0" if device == "cuda" else device


def _models(config: RetrieverConfig, num_gpus: int) -> Iterator[MemoryNeed]:
    encoder, rerank = config.encoder, config.rerank
    models = []
    if _is_dense(config):
        for name in _model_names(encoder):
            models.append(("encoder", name, encoder.encoder_device, encoder.encoder_dtype))
    if (reranker := rerank.reranker_model) is not None:
        models.append(("reranker", reranker, rerank.reranker_device, rerank.reranker_dtype))
    for what, name, device, dtype in models:
        device = _with_index(device or ("cuda:0" if num_gpus else "cpu"))
        yield MemoryNeed(device, f"{what} {Path(name).name}", bytes_of_model(name, dtype))


def _documents(config: RetrieverConfig, file: Path | None) -> Iterator[MemoryNeed]:
    """Yield the corpus and its row offsets; `file` is the FAISS file of a dense index, if any."""
    corpus = Path(config.corpus_path or "")
    if config.corpus_path is None or not corpus.is_file():
        return
    offsets = corpus.with_name(corpus.name + OFFSETS)
    if offsets.is_file():
        yield MemoryNeed("cpu", "row offsets", offsets.stat().st_size)
    elif file is not None and is_flat(file):
        yield MemoryNeed("cpu", "row offsets", read_shape(file)[0] * OFFSET_BYTES)
    else:
        yield MemoryNeed("cpu", "row offsets (8 bytes a document)", None)
    yield MemoryNeed("cpu", "documents (mapped file)", corpus.stat().st_size, optional=True)


def _devices(host: Host) -> dict[str, int]:
    return {"cpu": host.free} | {f"cuda:{i}": free for i, free in enumerate(host.gpus)}


def _total(needs: list[MemoryNeed]) -> int:
    return sum(need.bytes or 0 for need in needs if not need.optional)


def _shortages(needs: list[MemoryNeed], host: Host) -> list[str]:
    free, sentences = _devices(host), []
    for device in dict.fromkeys(need.device for need in needs):
        required = [n for n in needs if n.device == device and not n.optional]
        if device in free and _total(required) > free[device]:
            parts = ", ".join(f"{n.what} {n.amount}" for n in required)
            sentences.append(
                f"{device} needs {format_bytes(_total(required))} ({parts}), "
                f"but {format_bytes(free[device])} is free"
            )
    return sentences


def _hints(file: Path | None) -> str:
    if file is None or not is_flat(file):
        return ""
    shape = read_shape(file)[:2]
    half, quarter = (format_bytes(bytes_of_matrix(t, *shape)) for t in ("bfloat16", "int8"))
    return (
        f", use --dense_engine torch with --matrix_dtype bfloat16 ({half}) or int8 ({quarter}), "
        "more GPUs or --matrix_devices cpu, or build a smaller index with index_builder "
        "--faiss_type IVF4096,SQ8 or IVF4096,PQ64"
    )
