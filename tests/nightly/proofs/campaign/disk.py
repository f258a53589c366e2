"""A small disk for a run, which can be filled and made read-only. Needs root and Linux."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path
from typing import Self

SIZE = "3g"
FILLER = "filler"


class SmallDisk:
    """A tmpfs at `folder` within the context.

    Without the permission to mount, it is not `available`, and `folder` is a plain folder.
    """

    def __init__(self, folder: Path) -> None:
        """The disk is mounted when the context is entered."""
        self.folder = folder
        self.available = False

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "campaign", str(self.folder)]
        self.available = subprocess.run(mount, capture_output=True, check=False).returncode == 0
        return self

    def __exit__(self, *_: object) -> None:
        if self.available:
            subprocess.run(["umount", "--lazy", str(self.folder)], check=False)

    def fill(self) -> None:
        """Use all free space."""
        with (self.folder / FILLER).open("wb") as file:
            for size in (1 << 24, 1 << 12):  # large, then small pieces
                with contextlib.suppress(OSError):
                    while True:
                        os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), size)

    def free(self) -> None:
        """Release the space that `fill` used."""
        (self.folder / FILLER).unlink(missing_ok=True)

    def lock(self, run: Path) -> None:
        """Prevent creating, renaming and removing files in `run`, even for root."""
        subprocess.run(["chattr", "+i", str(run)], check=True)

    def unlock(self, run: Path) -> None:
        """Undo `lock`."""
        subprocess.run(["chattr", "-i", str(run)], check=True)
