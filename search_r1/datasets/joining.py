"""Parts to one file without twice the disk, and .gz to plain; both appear when complete."""

from __future__ import annotations

import gzip
import os
import shutil
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from search_r1.datasets.hub import CHUNK_BYTES, DownloadError, HubFile
from verl.files import whole_file

MOST_RATIO = 20
"""To which text is packed at most; what unpacks to more is made to fill a disk."""


class Joined:
    """A file that is made by appending parts; how long it is says which parts it has."""

    def __init__(self, target: Path, parts: Sequence[HubFile]) -> None:
        """`target` appears when all `parts` are joined."""
        self._target = target
        self._partial = target.with_name(f".{target.name}.partial")
        self._parts = list(parts)

    @property
    def size(self) -> int:
        """Bytes that are joined by now."""
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
        """Let the target appear."""
        whole = sum(part.size for part in self._parts)
        assert self.size == whole, f"{self._partial}: {self.size} bytes, expected {whole}"
        self._partial.replace(self._target)


def unpack(packed: Path, target: Path) -> None:
    """Unpack a .gz as a stream and remove it; raises DownloadError if it is not one."""
    most = max(MOST_RATIO * packed.stat().st_size, CHUNK_BYTES)
    try:
        with (
            gzip.open(packed, "rb") as source,
            whole_file(target, is_lasting=True) as part,
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
