"""CRC-32 of every block of an index's files, kept beside them, so that later damage is noticed.

A folder has them in `checksums.json`, a single file in `FILE.checksums.json`. A start compares at
most SAMPLED blocks, others each time; `whole` compares all of them, and finds any flipped bit, also
in the checksums themselves. Small files are always compared whole.
"""

import logging
import random
import textwrap
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson
from pydantic import TypeAdapter

from search_r1.search.errors import IndexMismatch
from verl.files import atomic_write, regular_file

logger = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 20
SAMPLED = 64
"""Blocks that a start reads at most of an index, and of a corpus: 64 MB."""
IGNORED = {"checksums.json", "write.lock"}
"""Files of a folder without checksums: these ones, and the lock that Lucene leaves."""


@dataclass(frozen=True)
class FileChecksums:
    """One file."""

    size: int
    crc32: str
    """Eight hexadecimal digits for each block."""


@dataclass(frozen=True)
class Checksums:
    """The files of one index or corpus."""

    files: dict[str, FileChecksums]
    """By what follows the target in their paths: `/vectors.faiss` in a folder, else `` itself."""
    corpus: str = ""
    """Hash of the corpus that an index without a manifest belongs to; empty: not known."""
    version: int = 1

    def save(self, target: Path) -> None:
        """Write them beside `target`, whole or not at all."""
        with atomic_write(path_for(target)) as part:
            part.write_bytes(self._text())

    @classmethod
    def load(cls, target: Path) -> "Checksums":
        """Those of `target`; raises IndexMismatch for a file that is not as `save` wrote it."""
        path = path_for(target)
        try:
            text = regular_file(path).read_bytes()
            found = READER.validate_json(text)
            if found._text() != text or found.version != 1:
                raise ValueError("changed since it was written, or of another version")
        except (OSError, ValueError) as error:
            raise IndexMismatch(_wrong(path, textwrap.shorten(str(error), 300), target)) from error
        return found

    def _text(self) -> bytes:
        return orjson.dumps(asdict(self))


READER = TypeAdapter(Checksums)


def path_for(target: Path) -> Path:
    """Where the checksums of a folder or file are."""
    return target / "checksums.json" if target.is_dir() else Path(f"{target}.checksums.json")


def add_command(target: Path) -> str:
    """The command line that keeps the checksums of an index, or of a corpus, as it is now."""
    is_corpus = Path(f"{target}.offsets.npy").exists()
    return f"search-r1 index checksums --{'corpus' if is_corpus else 'index'}_path {target}"


def block_checksums(data: bytes | memoryview) -> str:
    """The checksums of consecutive blocks, of which only the last may be short."""
    starts = range(0, len(data), BLOCK_BYTES)
    return "".join(f"{zlib.crc32(data[start : start + BLOCK_BYTES]):08x}" for start in starts)


def file_checksums(path: Path) -> FileChecksums:
    """The checksums of a file as it is now."""
    parts, size = [], 0
    with path.open("rb") as file:
        while data := file.read(16 * BLOCK_BYTES):
            parts.append(block_checksums(data))
            size += len(data)
    return FileChecksums(size, "".join(parts))


def add(target: Path, corpus: str = "") -> None:
    """Keep the checksums of a folder's files, or of one file, as they are now."""
    inside = sorted(path for path in target.rglob("*") if path.is_file())
    names = [f"/{path.relative_to(target).as_posix()}" for path in inside] or [""]
    names = [name for name in names if Path(name).name not in IGNORED]
    Checksums({name: file_checksums(Path(f"{target}{name}")) for name in names}, corpus).save(
        target
    )


def check(target: Path, *, whole: bool = False) -> Checksums | None:
    """Raise IndexMismatch for a file that has changed; None, and a warning, without checksums."""
    if not path_for(target).exists():
        if target.exists():
            logger.warning("%s has no checksums; add them: %s", target, add_command(target))
        return None
    known = Checksums.load(target)
    path = target
    try:
        for name, sums in known.files.items():
            path = Path(f"{target}{name}")
            if (size := path.stat().st_size) != sums.size:
                raise IndexMismatch(_wrong(path, f"{size} bytes instead of {sums.size}", target))
        for name, number in _blocks(known, whole):
            path, digits = Path(f"{target}{name}"), known.files[name].crc32
            with path.open("rb") as file:
                file.seek(number * BLOCK_BYTES)
                if block_checksums(file.read(BLOCK_BYTES)) != digits[8 * number : 8 * number + 8]:
                    start = number * BLOCK_BYTES
                    got = f"other content in the {BLOCK_BYTES} bytes from byte {start} on"
                    raise IndexMismatch(_wrong(path, got, target))
    except OSError as error:
        raise IndexMismatch(_wrong(path, str(error), target)) from error
    return known


def sample_indices(count: int, most: int = SAMPLED) -> list[int]:
    """At most `most` of range(count) in order: the first, the last, and others by chance."""
    if count <= most:
        return list(range(count))
    return sorted({0, count - 1, *random.sample(range(count), most - 2)})


def _blocks(known: Checksums, whole: bool) -> list[tuple[str, int]]:
    """The blocks to compare, file by file: all, or some with the first and last of every file."""
    ends = {name: -(-sums.size // BLOCK_BYTES) for name, sums in known.files.items()}
    blocks = [(name, i) for name, end in ends.items() for i in range(end)]
    some = set() if whole else set(sample_indices(len(blocks)))
    return [
        block
        for i, block in enumerate(blocks)
        if whole or i in some or block[1] in (0, ends[block[0]] - 1)
    ]


def _wrong(path: Path, got: str, target: Path) -> str:
    return (
        f"{path} is damaged or was changed: got {got}, expected the file that the checksums of "
        f"{target} were made of; fix: build or download it again, or, if the change is wanted, "
        f"`{add_command(target)}`"
    )
