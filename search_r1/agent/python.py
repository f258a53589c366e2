"""The tool `python`: runs a Python program in a separate process with limits and no network.

Off unless `agent.tools` names it. `search_r1.agent.confinement` enforces the limits: they stop
programs that loop, fill memory or print without end, and they block the network. They do not hide
files, so a run that offers this tool should have a container or an operating-system user to itself.
"""

import asyncio
import contextlib
import math
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
    """Resource limits of one program."""

    seconds: float = 10.0
    """Wall-clock limit; CPU time is limited to the same number, rounded up."""
    memory: int = 1 << 30
    """Limit of the address space in bytes, including the interpreter's own."""
    output: int = 8_000
    """Maximum number of printed characters that are returned; the rest is dropped."""
    files: int = 1 << 24
    """Maximum size in bytes of each file it writes; its folder is deleted when it ends."""
    at_once: int = 4
    """Maximum number of concurrent programs per engine; further programs wait."""


class PythonTool(Tool):
    """Runs Python programs; no state is kept between programs."""

    name = "python"
    description = (
        "Runs a Python program without network and returns what it prints. Nothing is kept "
        "between programs."
    )
    parameters = text_arguments(code="the program; print what you want to see")
    fix = "run on Linux with seccomp (x86-64 or arm64), or leave python out of agent.tools"

    def __init__(self, config: Any = None, bounds: Bounds | None = None) -> None:
        """Create the tool with `bounds`; training runs use the defaults of `Bounds`."""
        super().__init__(config)
        self.bounds = bounds or Bounds()
        self._slots = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]()

    async def call(self, **arguments: Any) -> Observation:
        """Run the program and return its output with errors. Raises ToolError if none can run."""
        code = well_formed(str(arguments["code"]))  # JSON may contain a lone surrogate
        loop = asyncio.get_running_loop()  # a contended asyncio.Semaphore is bound to one loop
        async with self._slots.setdefault(loop, asyncio.Semaphore(self.bounds.at_once)):
            return Observation((Item(await self._run(code)),))

    def probe(self, seconds: float) -> str:
        """Check that a program can run with these limits here; return the problem, or ''."""
        bounds = Bounds(seconds=min(seconds, self.bounds.seconds))
        try:
            printed = loops.run(PythonTool(bounds=bounds)._run("print(6 * 7)"))
        except ToolError as error:
            return str(error)
        return "" if printed == "42" else f"a program that prints 42 printed {printed[-300:]!r}"

    async def _run(self, code: str) -> str:
        """Return the stdout and stderr of a program, plus a note if it ended abnormally."""
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
        """Start the sandboxed interpreter in a new session with an empty environment."""
        limits = (math.ceil(self.bounds.seconds), self.bounds.memory, self.bounds.files)
        try:
            return await asyncio.create_subprocess_exec(
                sys.executable, "-I", str(CONFINEMENT), *map(str, limits),
                stdin=asyncio.subprocess.PIPE, stdout=sink, stderr=sink, cwd=folder,
                env={"PATH": os.defpath, "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            message = explain("tool python", error, "a process for a program", self.fix)
            raise ToolError(message) from error

    async def _finish(self, process: asyncio.subprocess.Process, code: str) -> str:
        """Send the program, wait until it ends, and return a note if it ended abnormally."""
        time_is_up = f"(ended after {self.bounds.seconds:g} s: time is up)"
        try:
            await asyncio.wait_for(process.communicate(code.encode()), self.bounds.seconds)
        except TimeoutError:
            return time_is_up
        except (BrokenPipeError, ConnectionResetError):  # it ended before it had read all its input
            await process.wait()
        finally:
            # Kill the whole session, so that no process that the program started outlives it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if process.returncode == -signal.SIGXCPU:  # the CPU limit was reached before the timeout
            return time_is_up
        if process.returncode and process.returncode < 0:
            return f"(ended by {signal.Signals(-process.returncode).name})"
        return ""
