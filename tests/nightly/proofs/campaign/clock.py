"""A separate wall clock for a run, which can be set while it runs. Needs a C compiler and Linux."""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("clock.c")


class Clock:
    """The clock of all processes started with `command`; not `available` without a compiler."""

    def __init__(self, folder: Path) -> None:
        """Compile the clock library into `folder`."""
        self.library, self.offset = folder / "clock.so", folder / "clock_offset"
        self.offset.write_bytes(struct.pack("<q", 0))
        self.available = shutil.which("cc") is not None
        if self.available:
            words = ["cc", "-shared", "-fPIC", "-O2", str(SOURCE), "-o", str(self.library), "-ldl"]
            subprocess.run(words, check=True)

    def set_offset(self, seconds: int) -> None:
        """Set the clock wrong by `seconds`, immediately and in every process."""
        with self.offset.open("r+b") as file:  # in place, since the processes have it mapped
            file.write(struct.pack("<q", seconds))

    def command(self, words: Sequence[str]) -> list[str]:
        """Return the command `words` with this clock; monotonic time stays correct."""
        if not self.available:
            return list(words)
        return ["env", f"LD_PRELOAD={self.library}", f"CLOCK_OFFSET={self.offset}", *words]
