"""Fetch the published wiki-18 corpus and indexes: `search-r1 download corpus e5`.

Files come from the Hugging Face hub (`HF_ENDPOINT` names a mirror), go on where a download was
interrupted, are checked against the hub's SHA-256, joined and unpacked. `--dry-run` only tells
what would be fetched and the disk it needs. `python scripts/download.py --save_path D` is the
original Search-R1's command: corpus and e5 index, left packed and in parts as it left them.
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
    CHUNK_BYTES,
    DownloadError,
    HubFile,
    Patience,
    disk_error,
    fetch,
    have,
    list_files,
)
from search_r1.options import run
from verl.files import atomic_write

logger = logging.getLogger(__name__)

ROWS = 21_015_324
"""Passages of wiki-18."""
DIM = 768
HEADER_BYTES = 45
"""Of a FAISS Flat index."""


@dataclass(frozen=True)
class Item:
    """A row of what is published."""

    repo: str
    prefix: str
    """The files of the repository that are wanted start so."""
    target: str
    """What they become in --save_dir."""
    kind: str
    """`parts` are joined in order, `gzip` is unpacked, `folder` is kept as it is, and so are
    `files`, directly in the folder."""
    published_bytes: int
    """About what `target` takes, for when the hub cannot be reached."""


ITEMS = {
    "corpus": Item(
        "PeterJinGo/wiki-18-corpus", "wiki-18.jsonl.gz", "wiki-18.jsonl", "gzip", 14_000_000_000
    ),
    "e5": Item(
        "PeterJinGo/wiki-18-e5-index",
        "part_",
        "e5_Flat.index",
        "parts",
        ROWS * DIM * 4 + HEADER_BYTES,
    ),
    "e5-hnsw64": Item(
        "PeterJinGo/wiki-18-e5-index-HNSW64",
        "part_",
        "e5_HNSW64.index",
        "parts",
        ROWS * (DIM * 4 + 4 * 2 * 64 + 20),
    ),
    "bm25": Item("PeterJinGo/wiki-18-bm25-index", "bm25/", "bm25", "folder", 3_000_000_000),
}
MOST_RATIO = 20
"""To which text is packed at most; what unpacks to more is made to fill a disk."""
UNPACKED_PER_PACKED = 3
"""About what a byte of a packed corpus becomes."""
SERVE = {
    "e5": "--retriever_name e5 --retriever_model intfloat/e5-base-v2",
    "e5-hnsw64": "--retriever_name e5 --retriever_model intfloat/e5-base-v2",
    "bm25": "--retriever_name bm25",
}


class Joined:
    """The file `target`, made by appending parts; its length so far says which parts it has."""

    def __init__(self, target: Path, parts: Sequence[HubFile]) -> None:
        self._target = target
        self._partial = target.with_name(f".{target.name}.partial")
        self._parts = list(parts)

    @property
    def size(self) -> int:
        return self._partial.stat().st_size if self._partial.exists() else 0

    def missing(self) -> Iterator[HubFile]:
        """The parts that are not joined as a whole, in order."""
        end = 0
        for part in self._parts:
            end += part.size
            if self.size < end:
                yield part

    def append(self, part: HubFile, path: Path) -> None:
        """Join the next part and remove its own file, once it is on the disk."""
        start = sum(before.size for before in self._parts[: self._parts.index(part)])
        if start == 0:
            path.replace(self._partial)
            return
        with self._partial.open("r+b") as joined, path.open("rb") as source:
            joined.truncate(start)  # what a killed run had appended of this part
            joined.seek(start)
            shutil.copyfileobj(source, joined, CHUNK_BYTES)
            joined.flush()
            os.fsync(joined.fileno())
        path.unlink()

    def finish(self) -> None:
        whole = sum(part.size for part in self._parts)
        assert self.size == whole, f"{self._partial}: {self.size} bytes, expected {whole}"
        self._partial.replace(self._target)


def unpack(packed: Path, target: Path) -> None:
    """Unpack a .gz as a stream and remove it; raises DownloadError if it is not one."""
    most = max(MOST_RATIO * packed.stat().st_size, CHUNK_BYTES)
    try:
        with (
            gzip.open(packed, "rb") as source,
            atomic_write(target, is_durable=True) as part,
            part.open("wb") as file,
        ):
            while chunk := source.read(CHUNK_BYTES):
                file.write(chunk)
                if file.tell() > most:
                    raise EOFError(f"it unpacks to more than {most} bytes")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        packed.unlink()
        raise DownloadError(f"{packed} is no complete .gz ({error}): fetch it again") from error
    packed.unlink()


@dataclass(frozen=True)
class Plan:
    """What one item means for this machine."""

    item: Item
    files: tuple[HubFile, ...]
    """Empty where the hub could not be asked."""
    save_dir: Path

    @property
    def target(self) -> Path:
        return self.save_dir / self.item.target

    @property
    def aside(self) -> Path:
        return self.save_dir / f".{self.item.target}.parts"

    @property
    def fetched_bytes(self) -> int:
        return sum(file.size for file in self.files) or self.item.published_bytes

    @property
    def disk_bytes(self) -> int:
        """The most that lies on the disk at once."""
        sizes = [file.size for file in self.files]
        if not sizes:
            return self.item.published_bytes
        if self.item.kind == "gzip":
            return sum(sizes) + UNPACKED_PER_PACKED * sum(sizes)
        return sum(sizes) + (max(sizes[1:], default=0) if self.item.kind == "parts" else 0)

    @property
    def missing_bytes(self) -> int:
        """What of `disk_bytes` is not on the disk yet."""
        if self.item.kind == "files":
            return self.disk_bytes - sum(have(file, self.save_dir) for file in self.files)
        here = Joined(self.target, self.files).size if self.item.kind == "parts" else 0
        here += sum(path.stat().st_size for path in self.aside.rglob("*") if path.is_file())
        return 0 if self.target.exists() else max(0, self.disk_bytes - here)


def make_plan(item: Item, save_dir: Path, *, may_guess: bool) -> Plan:
    """An item's files; with `may_guess`, none of a hub that is away. Raises DownloadError."""
    patience = Patience(tries=1) if may_guess else Patience()
    try:
        files = tuple(list_files(item.repo, item.prefix, patience))
    except DownloadError as error:
        if not may_guess:
            raise
        logger.warning("%s; its size is the published one", error)
        files = ()
    return Plan(item, files, save_dir)


def describe(plan: Plan) -> str:
    """What would be fetched, and the disk it needs."""
    item = plan.item
    source = "" if plan.files else " (by published size; the hub was not asked)"
    lines = [
        f"{item.repo} -> {plan.target}{source}",
        f"  fetch {plan.fetched_bytes / 1e9:.2f} GB, disk {plan.disk_bytes / 1e9:.2f} GB",
    ]
    return "\n".join(lines + [f"  {file.path}  {file.size} bytes" for file in plan.files])


def carry_out(plan: Plan) -> None:
    """Fetch, check, join and unpack; what is finished already is left as it is."""
    if plan.item.kind == "files":
        for file in plan.files:
            fetch(plan.item.repo, file, plan.save_dir)
        return
    if plan.target.exists():
        logger.info("%s is there already", plan.target)
        return
    if plan.item.kind == "parts":
        joined = Joined(plan.target, plan.files)
        for file in joined.missing():
            joined.append(file, fetch(plan.item.repo, file, plan.aside))
        joined.finish()
    elif plan.item.kind == "gzip":
        unpack(fetch(plan.item.repo, plan.files[0], plan.aside), plan.target)
    else:
        for file in plan.files:
            fetch(plan.item.repo, file, plan.aside)
        (plan.aside / plan.item.prefix).rename(plan.target)
    shutil.rmtree(plan.aside, ignore_errors=True)


def serve_command(name: str, save_dir: Path) -> str:
    target = save_dir / ITEMS[name].target
    corpus = save_dir / ITEMS["corpus"].target
    return (
        f"python -m search_r1.search.retrieval_server {SERVE[name]} "
        f"--index_path {target} --corpus_path {corpus}"
    )


@dataclass(frozen=True, kw_only=True)
class DownloadOptions:
    """What to fetch, and where to."""

    items: tyro.conf.Positional[tuple[Literal["corpus", "e5", "e5-hnsw64", "bm25"], ...]] = ()
    """what to fetch; indexes need corpus too"""
    save_dir: Path = Path("data/wiki-18")
    """folder that receives it"""
    save_path: Path | None = None
    """the same for the original's command: corpus and e5, packed and in parts"""
    repo_id: str | None = None
    """a flag of the original's command, which does not read it either"""
    dry_run: bool = False
    """tell what would be fetched, and fetch nothing"""

    def __post_init__(self) -> None:
        """Raise DownloadError for neither items nor --save_path, or both."""
        if bool(self.items) == (self.save_path is not None):
            got = "both" if self.items else "neither items nor --save_path"
            fix = f"give --save_path alone, or what to fetch, of {', '.join(ITEMS)}"
            raise DownloadError(f"got {got}, expected one of them; fix: {fix}")


main = partial(run, "search_r1.datasets.download:start", DownloadOptions, prog="search-r1 download",
               description=__doc__)  # fmt: skip


def start(options: DownloadOptions) -> int:
    """Fetch, or tell what would be; returns the exit code. Raises DownloadError."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    if options.save_path is not None:
        return _keep(options.save_path, is_dry=options.dry_run)
    _obtain([ITEMS[name] for name in options.items], options.save_dir, is_dry=options.dry_run)
    served = [name for name in options.items if name in SERVE]
    if served and not options.dry_run:
        _say("serve with:", *[serve_command(name, options.save_dir) for name in served])
    return 0


def _keep(save_path: Path, *, is_dry: bool) -> int:
    """What the original's command does; its next two commands join and unpack."""
    items = [replace(ITEMS[name], kind="files", target=".") for name in ("corpus", "e5")]
    _obtain(items, save_path, is_dry=is_dry)
    if not is_dry:
        _say(
            "join, unpack and serve with:",
            f"cat {save_path}/{ITEMS['e5'].prefix}* > {save_path / ITEMS['e5'].target}",
            f"gzip -d {save_path / ITEMS['corpus'].prefix}",
            serve_command("e5", save_path),
        )
    return 0


def _obtain(items: list[Item], folder: Path, *, is_dry: bool) -> None:
    """Tell, and unless `is_dry` fetch; raises DownloadError where the disk is too small."""
    plans = [make_plan(item, folder, may_guess=is_dry) for item in items]
    _say(*map(describe, plans))
    problem = disk_error(folder, sum(plan.missing_bytes for plan in plans))
    if is_dry:
        _say(problem or "the disk is large enough")
        return
    if problem:
        raise DownloadError(problem)
    for plan in plans:
        carry_out(plan)


def _say(*lines: str) -> None:
    sys.stdout.write("\n".join([*lines, ""]))
