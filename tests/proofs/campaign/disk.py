"""A small disk of the run's own, which can be filled and made read-only. Needs root and Linux."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path
from typing import Self

SIZE = "3g"
FILLER = "filler"


class SmallDisk:
    """A tmpfs at `folder` while the context is open; `available` is False where none may be made.

    Without it `folder` is a plain folder.
    """

    def __init__(self, folder: Path) -> None:
        """Nothing is mounted yet."""
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
        """Leave not a byte free."""
        with (self.folder / FILLER).open("wb") as file:
            for size in (1 << 24, 1 << 12):  # the run writes too: what is free is not known before
                with contextlib.suppress(OSError):
                    while True:
                        os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), size)

    def free(self) -> None:
        """Give back what `fill` took."""
        (self.folder / FILLER).unlink(missing_ok=True)

    def lock(self, run: Path) -> None:
        """Nothing may be made, renamed or removed in `run`, not even by root."""
        subprocess.run(["chattr", "+i", str(run)], check=True)

    def unlock(self, run: Path) -> None:
        """Undo `lock`."""
        subprocess.run(["chattr", "-i", str(run)], check=True)
