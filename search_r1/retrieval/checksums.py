"""CRC-32 checksums of an index's or corpus's files, by block, to detect later damage.

They are in `checksums.json` inside a folder, or in `FILE.checksums.json` beside a single file. At
start a server compares SAMPLED random blocks, and the first and last block of each file; with
`whole` it compares all blocks, which finds any flipped bit, also in the checksums.
"""

import logging
import random
import textwrap
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson
from pydantic import TypeAdapter

from search_r1.retrieval.errors import IndexMismatch
from verl.files import atomic_write, regular_file

logger = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 20
SAMPLED = 64
"""Number of random blocks (MB) of an index, and of a corpus, that are compared at start."""
IGNORED = {"checksums.json", "write.lock"}
"""Files of a folder that have no checksums: the checksums themselves, and Lucene's lock file."""


@dataclass(frozen=True)
class FileChecksums:
    """Size and block checksums of one file."""

    size: int
    crc32: str
    """Eight hexadecimal digits for each block."""


@dataclass(frozen=True)
class Checksums:
    """Checksums of the files of one index or corpus."""

    files: dict[str, FileChecksums]
    """Keys are paths without the target's: `/vectors.faiss` in a folder, `""` for a single file."""
    corpus: str = ""
    """Hash of the corpus of an index that has no manifest; empty if unknown."""
    version: int = 1

    def save(self, target: Path) -> None:
        """Write the checksums of `target` atomically."""
        with atomic_write(path_for(target)) as part:
            part.write_bytes(self._text())

    @classmethod
    def load(cls, target: Path) -> "Checksums":
        """Read the checksums of `target`; raises IndexMismatch if their file was changed."""
        path = path_for(target)
        try:
            text = regular_file(path).read_bytes()
            checksums = READER.validate_json(text)
            if checksums._text() != text or checksums.version != 1:
                raise ValueError("changed since it was written, or of another version")
        except (OSError, ValueError) as error:
            raise _damaged(path, textwrap.shorten(str(error), 300), target) from error
        return checksums

    def _text(self) -> bytes:
        return orjson.dumps(asdict(self))


READER = TypeAdapter(Checksums)


def path_for(target: Path) -> Path:
    """Return the path of the checksums of a folder or file."""
    return target / "checksums.json" if target.is_dir() else Path(f"{target}.checksums.json")


def add_command(target: Path) -> str:
    """Return the command line that stores the current checksums of an index or corpus."""
    is_corpus = Path(f"{target}.offsets.npy").exists()
    return f"search-r1 index checksums --{'corpus' if is_corpus else 'index'}_path {target}"


def block_checksums(data: bytes | memoryview) -> str:
    """Return the checksums of consecutive blocks; only the last block may be short."""
    starts = range(0, len(data), BLOCK_BYTES)
    return "".join(f"{zlib.crc32(data[start : start + BLOCK_BYTES]):08x}" for start in starts)


def file_checksums(path: Path) -> FileChecksums:
    """Compute the checksums of a file."""
    parts, size = [], 0
    with path.open("rb") as file:
        while data := file.read(16 * BLOCK_BYTES):
            parts.append(block_checksums(data))
            size += len(data)
    return FileChecksums(size, "".join(parts))


def add(target: Path, corpus: str = "") -> None:
    """Compute and store the checksums of a file, or of the files of a folder."""
    inside = sorted(path for path in target.rglob("*") if path.is_file())
    names = [f"/{path.relative_to(target).as_posix()}" for path in inside] or [""]
    names = [name for name in names if Path(name).name not in IGNORED]
    files = {name: file_checksums(Path(f"{target}{name}")) for name in names}
    Checksums(files, corpus).save(target)


def check(target: Path, *, whole: bool = False) -> Checksums | None:
    """Raise IndexMismatch for a damaged file; without checksums warn and return None."""
    if not path_for(target).exists():
        if target.exists():
            logger.warning("%s has no checksums; add them: %s", target, add_command(target))
        return None
    checksums = Checksums.load(target)
    path = target
    try:
        for name, expected in checksums.files.items():
            path = Path(f"{target}{name}")
            if (size := path.stat().st_size) != expected.size:
                raise _damaged(path, f"{size} bytes instead of {expected.size}", target)
        for name, block in _blocks_to_compare(checksums, whole):
            path, start = Path(f"{target}{name}"), block * BLOCK_BYTES
            expected_crc = checksums.files[name].crc32[8 * block : 8 * block + 8]
            with path.open("rb") as file:
                file.seek(start)
                if block_checksums(file.read(BLOCK_BYTES)) != expected_crc:
                    got = f"other content in the {BLOCK_BYTES} bytes from byte {start} on"
                    raise _damaged(path, got, target)
    except OSError as error:
        raise _damaged(path, str(error), target) from error
    return checksums


def sample_indices(count: int, max_samples: int = SAMPLED, *, whole: bool = False) -> Sequence[int]:
    """Return up to `max_samples` sorted indices of range(count), with both ends; or the `whole`."""
    if whole or count <= max_samples:
        return range(count)
    return sorted({0, count - 1, *random.sample(range(count), max_samples - 2)})


def _blocks_to_compare(checksums: Checksums, whole: bool) -> list[tuple[str, int]]:
    """Return (file, block number): all, or a sample with the first and last block of every file."""
    num_blocks = {name: -(-file.size // BLOCK_BYTES) for name, file in checksums.files.items()}
    blocks = [(name, i) for name, count in num_blocks.items() for i in range(count)]
    sampled = {blocks[i] for i in sample_indices(len(blocks), whole=whole)}
    return [
        (name, i) for name, i in blocks if (name, i) in sampled or i in (0, num_blocks[name] - 1)
    ]


def _damaged(path: Path, got: str, target: Path) -> IndexMismatch:
    return IndexMismatch(
        f"{path} is damaged or was changed: got {got}, expected the file that the checksums of "
        f"{target} were computed from; fix: build or download it again, or, if the change is "
        f"intended, `{add_command(target)}`"
    )
