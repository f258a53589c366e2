"""Replays that the page asks for: one at a time, each in a process of its own that ends with it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from typing import Annotated, Any

import orjson
from fastapi import HTTPException
from pydantic import BaseModel, Field

from search_r1.view.dialogue import read_dialogue
from search_r1.view.run import Run

MOST_S = 1800.0
"""A replay that takes longer is ended."""
Text = Annotated[str, Field(max_length=100_000, pattern=r"^[^\x00]*$")]
Whole = Annotated[int, Field(ge=0, le=2**31)]


class Document(BaseModel):
    """What a search is to bring."""

    title: Text | None = None
    text: Text
    id: Text | None = None


class Asked(BaseModel):
    """A trajectory, and what is changed of it: the options of `search-r1 replay`."""

    run: Whole = 0
    step: Whole
    line: Whole
    turn: Annotated[int, Field(ge=1)] = 1
    query: Text | None = None
    text: Text | None = None
    documents: list[list[Document]] | None = None
    gradient: bool = False

    def words(self) -> list[str]:
        """The command line; documents come by its standard input."""
        edits = {"query": self.query, "text": self.text}
        words = [f"--{name}={value}" for name, value in edits.items() if value is not None]
        words += ["--documents=/dev/stdin"] * (self.documents is not None)
        words += ["--gradient"] * self.gradient
        return [f"--trajectory={self.step}:{self.line}", f"--turn={self.turn}", *words, "--json"]


class Replays:
    """Carries out one at a time, so that a replay never takes from another's memory."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def replay(self, run: Run, asked: Asked) -> dict[str, Any]:
        """What `search-r1 replay` says of it, and the dialogue as the page shows one.

        Raises an HTTPException with the one line that the command ended with.
        """
        if run.rollouts is None:
            raise HTTPException(422, "the run keeps no training trajectories to be replayed")
        if self._lock.locked():
            raise HTTPException(409, "another replay is under way; ask again when it has ended")
        async with self._lock:
            command = [str(run.folder), f"--rollouts={run.rollouts}", *asked.words()]
            out, err = await _said(command, asked)
        if not out:
            lines = [line for line in err.decode(errors="replace").splitlines() if line.strip()]
            raise HTTPException(422, lines[-1].strip() if lines else "the replay was ended")
        found: dict[str, Any] = orjson.loads(out)
        row = found.pop("row")
        return {**found, "status": row["status"], **run.shown(row, read_dialogue(row, run.tags))}


async def _said(command: list[str], asked: Asked) -> tuple[bytes, bytes]:
    """What the command wrote; all that it started ends with it."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "search_r1.replay.command", *command,
        stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True,
    )  # fmt: skip
    documents = orjson.dumps([[d.model_dump() for d in one] for one in asked.documents or ()])
    try:
        return await asyncio.wait_for(process.communicate(documents), MOST_S)
    except TimeoutError as error:
        raise HTTPException(504, f"the replay took over {MOST_S:g} s and was ended") from error
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
