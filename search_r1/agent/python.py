"""The tool `python`: a program in a process of its own, with bounds and without network.

Off unless `agent.tools` names it. Bounds are those of `search_r1.agent.confinement`: they hold a
program that loops, fills memory or prints without end, and keep it from the network. They do not
hide files: whoever lets a policy run programs gives the run a container, or a user, of its own.
"""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from search_r1 import loops
from search_r1.search.schema import well_formed
from verl.agent.interface import Item, Observation, Tool, text_arguments
from verl.errors import ToolError, explain

CONFINEMENT = Path(__file__).with_name("confinement.py")
CUT = "\n… (the output goes on)"


@dataclass(frozen=True)
class Bounds:
    """What one program may take."""

    seconds: float = 10.0
    """Of the clock; the processor's seconds are bound by the same number, rounded up."""
    memory: int = 1 << 30
    """Bytes of address space, the interpreter's own included."""
    output: int = 8_000
    """Characters of what it prints; the rest is left out."""
    files: int = 1 << 24
    """Bytes of a file that it writes; its folder goes when it ends."""
    at_once: int = 4
    """Programs that run at one time beside each engine; others wait."""


class PythonTool(Tool):
    """Runs Python programs; nothing is kept from one to the next."""

    name = "python"
    description = (
        "Runs a Python program without network and returns what it prints. Nothing is kept "
        "between programs."
    )
    parameters = text_arguments(code="the program; print what you want to see")
    fix = "run on Linux with seccomp (x86-64 or arm64), or leave python out of agent.tools"

    def __init__(self, config: Any = None, bounds: Bounds | None = None) -> None:
        """`bounds` are the defaults of `Bounds` in a run."""
        super().__init__(config)
        self.bounds = bounds or Bounds()
        self._places = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]()

    async def call(self, **arguments: Any) -> Observation:
        """What the program prints, errors included. Raises ToolError where none can run."""
        code = well_formed(str(arguments["code"]))  # JSON may name half a character
        loop = asyncio.get_running_loop()  # a semaphore that made somebody wait is its loop's alone
        async with self._places.setdefault(loop, asyncio.Semaphore(self.bounds.at_once)):
            return Observation((Item(await self._run(code)),))

    def probe(self, seconds: float) -> str:
        """Whether a program can be confined here."""
        bounds = Bounds(seconds=min(seconds, self.bounds.seconds))
        try:
            printed = loops.run(PythonTool(bounds=bounds)._run("print(6 * 7)"))
        except ToolError as error:
            return str(error)
        return "" if printed == "42" else f"a program that prints 42 printed {printed[-300:]!r}"

    async def _run(self, code: str) -> str:
        """Standard output and errors of one program, and how it ended if not by itself."""
        with tempfile.TemporaryDirectory(prefix="search-r1-python-") as folder:
            output = Path(folder) / "output"
            with output.open("wb") as sink:
                process = await self._start(folder, sink.fileno())
                ending = await self._finish(process, code)
            with output.open(encoding="utf-8", errors="replace") as text:
                printed = text.read(self.bounds.output + 1)
        if len(printed) > self.bounds.output:
            printed = printed[: self.bounds.output] + CUT
        return "\n".join(part for part in (printed.strip(), ending) if part) or "(no output)"

    async def _start(self, folder: str, sink: int) -> asyncio.subprocess.Process:
        """The confined interpreter in a session of its own, in an empty environment."""
        bounds = self.bounds
        limits = (-(-bounds.seconds // 1), bounds.memory, bounds.files)
        try:
            return await asyncio.create_subprocess_exec(
                sys.executable, "-I", str(CONFINEMENT), *(str(int(limit)) for limit in limits),
                stdin=asyncio.subprocess.PIPE, stdout=sink, stderr=sink, cwd=folder,
                env={"PATH": os.defpath, "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            expected = "a process for a program"
            raise ToolError(explain("tool python", error, expected, self.fix)) from error

    async def _finish(self, process: asyncio.subprocess.Process, code: str) -> str:
        """Give the program and wait for its end; how it ended, empty for the usual way."""
        time_is_up = f"(ended after {self.bounds.seconds:g} s: time is up)"
        try:
            await asyncio.wait_for(process.communicate(code.encode()), self.bounds.seconds)
        except TimeoutError:
            return time_is_up
        except (BrokenPipeError, ConnectionResetError):  # it ended before it had read everything
            await process.wait()
        finally:
            # The whole session, so that nothing that the program started outlives it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if process.returncode == -signal.SIGXCPU:  # the kernel was first to notice
            return time_is_up
        if process.returncode and process.returncode < 0:
            return f"(ended by {signal.Signals(-process.returncode).name})"
        return ""
