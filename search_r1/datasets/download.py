"""Download the published wiki-18 corpus and indexes: `search-r1 download corpus e5`.

Files come from the Hugging Face hub (`HF_ENDPOINT` names a mirror). Interrupted downloads are
resumed; files are verified by the hub's SHA-256, joined and unpacked. `--dry-run` only prints what
would be downloaded and the disk space that it needs. `python scripts/download.py --save_path D` is
the command of the original Search-R1: corpus and e5 index, compressed and in parts as on the hub.
"""

import gzip
import logging
import os
import shutil
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import tyro

from search_r1.datasets.hub import (
    DownloadError,
    HubFile,
    bytes_on_disk,
    disk_error,
    fetch,
    list_files,
)
from search_r1.options import run
from verl.files import atomic_write

logger = logging.getLogger(__name__)

ROWS = 21_015_324
"""Number of passages of wiki-18."""
DIM = 768
HEADER_BYTES = 45
"""Size of the header of a FAISS Flat index."""
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Item:
    """A published corpus or index."""

    repo: str
    prefix: str
    """Prefix of its files in the repository."""
    target: str
    """Name of the result in --save_dir."""
    kind: str
    """`parts` are joined in order, `gzip` is decompressed, `folder` is kept as it is, and `files`
    are kept as they are, directly in --save_dir."""
    published_bytes: int
    """Approximate size of `target`, used if the hub cannot be reached."""


ITEMS = {
    "corpus": Item("PeterJinGo/wiki-18-corpus", "wiki-18.jsonl.gz", "wiki-18.jsonl", "gzip",
                   14_000_000_000),
    "e5": Item("PeterJinGo/wiki-18-e5-index", "part_", "e5_Flat.index", "parts",
               ROWS * DIM * 4 + HEADER_BYTES),
    "e5-hnsw64": Item("PeterJinGo/wiki-18-e5-index-HNSW64", "part_", "e5_HNSW64.index", "parts",
                      ROWS * (DIM * 4 + 4 * 2 * 64 + 20)),
    "bm25": Item("PeterJinGo/wiki-18-bm25-index", "bm25/", "bm25", "folder", 3_000_000_000),
}  # fmt: skip
TYPICAL_COMPRESSION_RATIO = 3
"""Approximate compression ratio of the corpus."""
E5_FLAGS = "--retriever_name e5 --retriever_model intfloat/e5-base-v2"
SERVE_FLAGS = {"e5": E5_FLAGS, "e5-hnsw64": E5_FLAGS, "bm25": "--retriever_name bm25"}


class JoinedFile:
    """The file `target`, made by appending parts; its size shows which parts it has."""

    def __init__(self, target: Path, parts: Sequence[HubFile]) -> None:
        self._target = target
        self._partial = target.with_name(f".{target.name}.partial")
        self._parts = list(parts)

    @property
    def size(self) -> int:
        return self._partial.stat().st_size if self._partial.exists() else 0

    def missing(self) -> Iterator[HubFile]:
        """Yield the parts that are not or only partly appended, in order."""
        end = 0
        for part in self._parts:
            end += part.size
            if self.size < end:
                yield part

    def append(self, part: HubFile, path: Path) -> None:
        """Append the next part, from its file `path`, which is removed afterwards."""
        start = sum(before.size for before in self._parts[: self._parts.index(part)])
        if start == 0:
            path.replace(self._partial)
            return
        with self._partial.open("r+b") as joined, path.open("rb") as source:
            joined.truncate(start)  # removes what a killed run appended of this part
            joined.seek(start)
            shutil.copyfileobj(source, joined, CHUNK_BYTES)
            joined.flush()
            os.fsync(joined.fileno())
        path.unlink()

    def finish(self) -> None:
        expected = sum(part.size for part in self._parts)
        assert self.size == expected, f"{self._partial}: {self.size} bytes, expected {expected}"
        self._partial.replace(self._target)


def unpack(archive: Path, target: Path) -> None:
    """Decompress a .gz and remove it; raises DownloadError for an invalid archive."""
    try:
        with (
            gzip.open(archive, "rb") as source,
            atomic_write(target, is_durable=True) as part,
            part.open("wb") as file,
        ):
            shutil.copyfileobj(source, file, CHUNK_BYTES)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        archive.unlink()
        raise DownloadError(f"{archive} is not a complete .gz ({error}): fetch it again") from error
    archive.unlink()


@dataclass(frozen=True)
class Plan:
    """The files and the disk space of one item on this machine."""

    item: Item
    files: tuple[HubFile, ...]
    """Empty if the hub could not be reached."""
    save_dir: Path

    @property
    def target(self) -> Path:
        return self.save_dir / self.item.target

    @property
    def parts_dir(self) -> Path:
        """Folder of the files before they are joined or unpacked."""
        return self.save_dir / f".{self.item.target}.parts"

    @property
    def fetched_bytes(self) -> int:
        return sum(file.size for file in self.files) or self.item.published_bytes

    @property
    def disk_bytes(self) -> int:
        """Maximum disk space in use at any time."""
        sizes = [file.size for file in self.files]
        if not sizes:
            return self.item.published_bytes
        if self.item.kind == "gzip":
            return (1 + TYPICAL_COMPRESSION_RATIO) * sum(sizes)
        return sum(sizes) + (max(sizes[1:], default=0) if self.item.kind == "parts" else 0)

    @property
    def missing_bytes(self) -> int:
        """The part of `disk_bytes` that is not on the disk yet."""
        if self.item.kind == "files":
            return self.disk_bytes - sum(bytes_on_disk(file, self.save_dir) for file in self.files)
        if self.target.exists():
            return 0
        present = JoinedFile(self.target, self.files).size if self.item.kind == "parts" else 0
        present += sum(path.stat().st_size for path in self.parts_dir.rglob("*") if path.is_file())
        return max(0, self.disk_bytes - present)


def make_plan(item: Item, save_dir: Path, *, may_estimate: bool) -> Plan:
    """List an item's files; with `may_estimate`, an unavailable hub is only a warning."""
    try:
        files = tuple(list_files(item.repo, item.prefix))
    except DownloadError as error:
        if not may_estimate:
            raise
        logger.warning("%s; using its published size", error)
        files = ()
    return Plan(item, files, save_dir)


def describe(plan: Plan) -> str:
    """Return the files to download and the disk space, as text."""
    item = plan.item
    source = "" if plan.files else " (by published size; the hub did not answer)"
    sizes = f"  fetch {plan.fetched_bytes / 1e9:.2f} GB, disk {plan.disk_bytes / 1e9:.2f} GB"
    files = [f"  {file.path}  {file.size} bytes" for file in plan.files]
    return "\n".join([f"{item.repo} -> {plan.target}{source}", sizes, *files])


def execute(plan: Plan) -> None:
    """Download, verify, join and unpack an item, unless its target exists."""
    if plan.item.kind == "files":
        for file in plan.files:
            fetch(plan.item.repo, file, plan.save_dir)
        return
    if plan.target.exists():
        logger.info("%s is there already", plan.target)
        return
    if plan.item.kind == "parts":
        joined = JoinedFile(plan.target, plan.files)
        for file in joined.missing():
            joined.append(file, fetch(plan.item.repo, file, plan.parts_dir))
        joined.finish()
    elif plan.item.kind == "gzip":
        unpack(fetch(plan.item.repo, plan.files[0], plan.parts_dir), plan.target)
    else:
        for file in plan.files:
            fetch(plan.item.repo, file, plan.parts_dir)
        (plan.parts_dir / plan.item.prefix).rename(plan.target)
    shutil.rmtree(plan.parts_dir, ignore_errors=True)


def serve_command(name: str, save_dir: Path) -> str:
    corpus = save_dir / ITEMS["corpus"].target
    return (
        f"python -m search_r1.search.retrieval_server {SERVE_FLAGS[name]} "
        f"--index_path {save_dir / ITEMS[name].target} --corpus_path {corpus}"
    )


@dataclass(frozen=True, kw_only=True)
class DownloadOptions:
    """What to download, and to which folder."""

    items: tyro.conf.Positional[tuple[Literal["corpus", "e5", "e5-hnsw64", "bm25"], ...]] = ()
    """what to download; indexes need corpus too"""
    save_dir: Path = Path("data/wiki-18")
    """folder that receives it"""
    save_path: Path | None = None
    """as in the original's command: folder for corpus and e5, compressed and in parts"""
    repo_id: str | None = None
    """ignored, as by the original's command"""
    dry_run: bool = False
    """print what would be downloaded, and download nothing"""

    def __post_init__(self) -> None:
        """Raise DownloadError unless either items or --save_path are given."""
        if bool(self.items) == (self.save_path is not None):
            got = "both" if self.items else "neither items nor --save_path"
            fix = f"give --save_path alone, or items among {', '.join(ITEMS)}"
            raise DownloadError(f"got {got}, expected one of them; fix: {fix}")


main = partial(run, "search_r1.datasets.download:start", DownloadOptions, prog="search-r1 download",
               description=__doc__)  # fmt: skip


def start(options: DownloadOptions) -> int:
    """Run the command and return its exit code. Raises DownloadError."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    if options.save_path is not None:
        _download_unchanged(options.save_path, is_dry=options.dry_run)
        return 0
    _download([ITEMS[name] for name in options.items], options.save_dir, is_dry=options.dry_run)
    indexes = [name for name in options.items if name in SERVE_FLAGS]
    if indexes and not options.dry_run:
        _print("serve with:", *[serve_command(name, options.save_dir) for name in indexes])
    return 0


def _download_unchanged(save_path: Path, *, is_dry: bool) -> None:
    """Download as the original's command does; the user joins and unpacks the files."""
    items = [replace(ITEMS[name], kind="files", target=".") for name in ("corpus", "e5")]
    _download(items, save_path, is_dry=is_dry)
    if not is_dry:
        _print(
            "join, unpack and serve with:",
            f"cat {save_path}/{ITEMS['e5'].prefix}* > {save_path / ITEMS['e5'].target}",
            f"gzip -d {save_path / ITEMS['corpus'].prefix}",
            serve_command("e5", save_path),
        )


def _download(items: list[Item], folder: Path, *, is_dry: bool) -> None:
    """Print the plans and, unless `is_dry`, download; raises DownloadError if the disk is full."""
    plans = [make_plan(item, folder, may_estimate=is_dry) for item in items]
    _print(*map(describe, plans))
    problem = disk_error(folder, sum(plan.missing_bytes for plan in plans))
    if is_dry:
        _print(problem or "the disk is large enough")
        return
    if problem:
        raise DownloadError(problem)
    for plan in plans:
        execute(plan)


def _print(*lines: str) -> None:
    sys.stdout.write("\n".join([*lines, ""]))
