"""The page's application: what it asks for, as JSON, and its files. It answers GET only, but
for replays, of which each is a process of its own that ends with it.

A request names a run by its number, never a path.
"""

import asyncio
import contextlib
import functools
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query, Request, Response
from pydantic import BaseModel, Field

from search_r1.bearer import has_token
from search_r1.search.server.pages import page_routes
from search_r1.view.advice import alarms
from search_r1.view.dialogue import read_dialogue
from search_r1.view.index import Wanted, Whole, find, over_steps
from search_r1.view.run import Run, compared

MOST_S = 1800.0
"""A replay that takes longer is ended."""
Text = Annotated[str, Field(max_length=100_000, pattern=r"^[^\x00]*$")]


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
        """What `search-r1 replay` says, and the dialogue as the page shows one, or its error."""
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


PAGE = Path(__file__).parent / "page"
TOKEN_VARIABLE = "VIEW_TOKEN"
MOST_POINTS = 600
"""Points of a curve on the page; of more, the peaks of each stretch are kept."""
MOST_STEPS = 60
"""Trajectories of one question side by side."""
PRIVATE = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}


class Runs:
    """What can be asked of the runs; `search_r1.view.export` asks the same for its file."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs

    def __getitem__(self, number: int) -> Run:
        """The run of a number. Raises a 404."""
        if not 0 <= number < len(self._runs):
            raise HTTPException(404, f"there is no run {number}")
        return self._runs[number]

    def about(self) -> list[dict[str, Any]]:
        return [run.about() for run in self._runs]

    def names(self) -> list[str]:
        return sorted({name for run in self._runs for name in run.metrics.names()})

    def curves(
        self,
        name: Annotated[list[str], Query(max_length=64)],
        most: Annotated[int, Query(ge=4)] = MOST_POINTS,
    ) -> dict[str, Any]:
        """Steps and values of each metric, of every run."""
        return {one: [run.metrics.curve(one, most) for run in self._runs] for one in name}

    def alarms(self) -> list[list[dict[str, Any]]]:
        return [[asdict(one) for one in alarms(run.metrics, run.config)] for run in self._runs]

    def config(self) -> list[dict[str, Any]]:
        return compared([run.config for run in self._runs])

    def trajectories(self, wanted: Annotated[Wanted, Depends()], run: int = 0) -> dict[str, Any]:
        """One page of a run's trajectories."""
        return find(self[run].index, wanted)

    def question(self, uid: str, kind: str = "", run: int = 0) -> list[dict[str, Any]]:
        """One question's trajectories over the steps, without their tokens."""
        rows = over_steps(self[run].index, uid, kind, MOST_STEPS)
        read = (
            self[run].trajectory(row["kind"], row["step"], row["line"], is_brief=True)
            for row in rows
        )
        return [one for one in read if one is not None]

    def trajectory(self, kind: str, step: Whole, line: Whole, run: int = 0) -> dict[str, Any]:
        """One trajectory by token. Raises a 404."""
        found = self[run].trajectory(kind, step, line)
        if found is None:
            raise HTTPException(404, f"there is no trajectory {kind} {step} {line}, or it was "
                                     "replaced this moment")  # fmt: skip
        return found


def create_app(runs: Runs, token: str | None = None) -> FastAPI:
    """The application; `token` is wanted from every client for what the runs hold."""

    def admit(request: Request) -> None:
        if token and not has_token(request.headers.get("Authorization", ""), token):
            text = f"a bearer token is needed: the value of {TOKEN_VARIABLE} on the server"
            raise HTTPException(401, text, {"WWW-Authenticate": "Bearer"})

    async def replay(asked: Asked, request: Request) -> Response:
        # No page of another site can send this without asking first, and that is never allowed.
        if request.headers.get("Content-Type", "").partition(";")[0] != "application/json":
            raise HTTPException(415, "a replay is asked for as application/json")
        return _answer(await replays.replay(runs[asked.run], asked))

    replays = Replays()
    app = FastAPI(title="Search-R1 view", docs_url=None, redoc_url=None, openapi_url=None)
    api = APIRouter(prefix="/api", dependencies=[Depends(admit)])
    answers: dict[str, Callable[..., Any]] = {
        "runs": runs.about, "metrics": runs.names, "curves": runs.curves, "alarms": runs.alarms,
        "config": runs.config, "trajectories": runs.trajectories, "question": runs.question,
        "trajectory": runs.trajectory,
    }  # fmt: skip
    for name, answer in answers.items():
        api.get(f"/{name}", response_model=None)(_as_json(answer))
    api.post("/replay", response_model=None)(replay)
    app.include_router(api)
    app.router.routes.extend(page_routes(sorted(PAGE.iterdir())))
    return app


def _as_json(answer: Callable[..., Any]) -> Callable[..., Response]:
    """A route's function; FastAPI's own way would go through every token's numbers once more."""

    @functools.wraps(answer)
    def say(*given: Any, **named: Any) -> Response:
        return _answer(answer(*given, **named))

    return say


def _answer(found: Any) -> Response:
    return Response(orjson.dumps(found), media_type="application/json", headers=PRIVATE)
