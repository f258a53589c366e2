"""Does it fit? The memory that an engine needs per device against what is free, before it loads.

What is needed comes from `needs`, what is free from `memory`; the alternatives of a refusal are
found by estimating each.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace

from search_r1.search.backends.flat_file import is_flat, read_shape
from search_r1.search.backends.settings import FaissConfig, RetrieverConfig, TorchConfig
from search_r1.search.errors import SetupError
from search_r1.search.memory import Host, bytes_of_index
from search_r1.search.needs import Need, estimate, index_file, is_dense, needs_torch

logger = logging.getLogger(__name__)

GB, MB = 1e9, 1e6
MAX_GPUS = 16
FACTORIES = ("HNSW32", "IVF4096,Flat", "IVF4096,SQ8", "IVF4096,PQ{m}")
"""Smaller or faster FAISS indexes that are proposed, by falling accuracy."""


def check(config: RetrieverConfig, host: Host | None = None) -> None:
    """Log what is needed and what is free; raise SetupError, with what would fit, if it does not.

    `host`: the machine to judge; default: this one, now.
    """
    host = host or Host.measure(with_gpus=needs_torch(config))
    needs = estimate(config, len(host.gpus))
    logger.info("memory needed and free:\n%s", table(needs, host))
    short = _short(needs, host)
    if short:
        options = list(_alternatives(config, host)) or ["free some memory, or a larger machine"]
        raise SetupError(
            f"this machine is too small: {'; '.join(short)}; expected settings that fit:\n  "
            + "\n  ".join(options)
        )


def table(needs: list[Need], host: Host) -> str:
    """One line per need and one per device, in GB (10⁹ bytes) or MB; optional ones in brackets."""
    lines = []
    for device, free in _devices(host).items():
        mine = [need for need in needs if need.device == device]
        lines += [f"  {device:8} {_amount(n):>12}  {n.what}" for n in mine]
        lines.append(f"  {device:8} {_gb(_total(mine)):>12}  needed of {_gb(free)} free")
    return "\n".join(lines)


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


def _alternatives(config: RetrieverConfig, host: Host) -> Iterator[str]:
    """What would fit this machine, the most accurate first, each with its bytes."""
    file = index_file(config)
    if not is_dense(config) or file is None or not is_flat(file):
        return
    rows, dim, _ = read_shape(file)
    for flags, other in _engines(config, host):
        if not _short(needs := estimate(other, len(host.gpus)), host):
            yield f"{flags}: {_sum_up(needs)}"
    yield from _more_gpus(config, host)
    yield from _smaller_indexes(config, host, rows, dim)


def _engines(config: RetrieverConfig, host: Host) -> Iterator[tuple[str, RetrieverConfig]]:
    """Settings that search the same index file otherwise, with their flags."""
    places: list[tuple[str, ...]] = [("cpu",)]
    if host.gpus:
        places.insert(0, ())
        gpu = replace(config, faiss=replace(config.faiss, faiss_gpu=True), torch=TorchConfig())
        yield "--faiss_gpu (with faiss-gpu)", gpu
    yield "--dense_engine faiss", replace(config, faiss=FaissConfig(), torch=TorchConfig())
    for dtype in ("float32", "bfloat16", "int8"):
        for place in places:
            matrix = replace(
                config.torch, dense_engine="torch", matrix_dtype=dtype, matrix_devices=place
            )
            on_cpu = " --matrix_devices cpu" if place and host.gpus else ""
            yield (
                f"--dense_engine torch --matrix_dtype {dtype}{on_cpu}",
                replace(config, faiss=FaissConfig(), torch=matrix),
            )
    if host.gpus and config.encoder.encoder_device != "cpu":
        yield (
            "--encoder_device cpu",
            replace(config, encoder=replace(config.encoder, encoder_device="cpu")),
        )


def _sum_up(needs: list[Need]) -> str:
    """What is needed on each device."""
    devices = dict.fromkeys(n.device for n in needs if not n.optional)
    amounts = [f"{_gb(_total([n for n in needs if n.device == d]))} on {d}" for d in devices]
    return f"needs {', '.join(amounts)}"


def _more_gpus(config: RetrieverConfig, host: Host) -> Iterator[str]:
    """The number of GPUs like the largest here that would hold a float16 matrix."""
    if not host.gpus:
        return
    matrix = replace(config.torch, dense_engine="torch", matrix_dtype="float16", matrix_devices=())
    other = replace(config, faiss=FaissConfig(), torch=matrix)
    for count in range(len(host.gpus) + 1, MAX_GPUS + 1):
        larger = replace(host, gpus=(max(host.gpus),) * count)
        if not _short(needs := estimate(other, count), larger):
            flags = "--dense_engine torch --matrix_dtype float16"
            yield f"{count} such GPUs and {flags}: {_sum_up(needs)}"
            return


def _smaller_indexes(config: RetrieverConfig, host: Host, rows: int, dim: int) -> Iterator[str]:
    """FAISS indexes to build that would fit the host's memory."""
    plain = replace(config, faiss=FaissConfig(), torch=TorchConfig())
    others = [n for n in estimate(plain, len(host.gpus)) if n.what != "index (FAISS)"]
    for factory in FACTORIES:
        factory = factory.format(m=max(1, dim // 8))
        size = bytes_of_index("faiss", "", rows, dim, factory=factory)
        if not _short(needs := [Need("cpu", factory, size), *others], host):
            yield f"an index by index_builder --faiss_type {factory}: {_sum_up(needs)}"
