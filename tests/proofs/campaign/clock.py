"""A wall clock of the run's own, which can be set while it runs. Needs a C compiler and Linux."""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("clock.c")


class Clock:
    """The clock of all processes begun by `command`; `available` is False without a compiler."""

    def __init__(self, folder: Path) -> None:
        """Compile it to `folder`."""
        self.library, self.offset = folder / "clock.so", folder / "clock_offset"
        self.offset.write_bytes(struct.pack("<q", 0))
        compiler = shutil.which("cc")
        self.available = compiler is not None
        if compiler is not None:
            words = [compiler, "-shared", "-fPIC", "-O2", str(SOURCE), "-o", str(self.library)]
            subprocess.run([*words, "-ldl"], check=True)

    def set_wrong(self, seconds: int) -> None:
        """Let it be wrong by so many seconds, at once and in every process."""
        with self.offset.open("r+b") as file:  # in place: the processes have it mapped
            file.write(struct.pack("<q", seconds))

    def command(self, words: Sequence[str]) -> list[str]:
        """What runs `words` by this clock; monotonic time is the true one."""
        if not self.available:
            return list(words)
        return ["env", f"LD_PRELOAD={self.library}", f"CLOCK_OFFSET={self.offset}", *words]
