"""The application behind the page: its files, and JSON about the runs.

Everything is GET except replays, each of which runs in a process that ends with it. A request
names a run by its number, never by a path.
"""

import asyncio
import contextlib
import functools
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from search_r1.bearer import has_token
from search_r1.retrieval.errors import DeadlineExceeded
from search_r1.retrieval.service.pages import page_routes
from search_r1.retrieval.service.requests import parse, read_body
from search_r1.runs.dialogue import read_dialogue
from search_r1.view.index import NonNegative, TrajectoryQuery, find_trajectories, question_history
from search_r1.view.run import Run

REPLAY_TIMEOUT_S = 1800.0
BODY_TIMEOUT_S = 60.0
MAX_REPLAY_BYTES = 32 << 20
"""Maximum size of a request; its documents are edited by hand."""
Text = Annotated[str, Field(max_length=100_000, pattern=r"^[^\x00]*$")]


class ReplacementDocument(BaseModel):
    """A document that a search returns in a replay."""

    model_config = ConfigDict(extra="forbid")

    title: Text | None = None
    text: Text
    id: Text | None = None


class ReplayRequest(BaseModel):
    """A trajectory and the edit to replay it with: the options of `search-r1 replay`."""

    model_config = ConfigDict(extra="forbid")

    run: NonNegative = 0
    step: NonNegative
    line: NonNegative
    turn: Annotated[int, Field(ge=1)] = 1
    query: Text | None = None
    text: Text | None = None
    documents: list[list[ReplacementDocument]] | None = None
    gradient: bool = False

    def arguments(self) -> list[str]:
        """Return the command-line arguments; the documents are passed on standard input."""
        edits = {"query": self.query, "text": self.text}
        words = [f"--{name}={value}" for name, value in edits.items() if value is not None]
        if self.documents is not None:
            words.append("--documents=/dev/stdin")
        if self.gradient:
            words.append("--gradient")
        return [f"--trajectory={self.step}:{self.line}", f"--turn={self.turn}", *words, "--json"]


class Replays:
    """Runs one replay at a time, so that replays never compete for memory."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def replay(self, run: Run, request: ReplayRequest) -> dict[str, Any]:
        """Return the output of `search-r1 replay`, or raise a 422 with its error message."""
        if run.rollouts is None:
            raise HTTPException(422, "the run has no recorded training trajectories to replay")
        if self._lock.locked():
            raise HTTPException(409, "another replay is in progress; try again when it has ended")
        async with self._lock:
            command = [str(run.folder), f"--rollouts={run.rollouts}", *request.arguments()]
            out, err = await _run_replay(command, request)
        if not out:
            lines = [line for line in err.decode(errors="replace").splitlines() if line.strip()]
            raise HTTPException(422, lines[-1].strip() if lines else "the replay was killed")
        result: dict[str, Any] = orjson.loads(out)
        row = result.pop("row")
        dialogue = run.dialogue_json(row, read_dialogue(row, run.tags, run.normalize))
        return {**result, "status": row["status"], **dialogue}


async def _run_replay(command: list[str], request: ReplayRequest) -> tuple[bytes, bytes]:
    """Return the command's output and errors; kills its whole process group at the end."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "search_r1.cli", "replay", *command,
        stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True,
    )  # fmt: skip
    documents = orjson.dumps([[d.model_dump() for d in call] for call in request.documents or ()])
    try:
        return await asyncio.wait_for(process.communicate(documents), REPLAY_TIMEOUT_S)
    except TimeoutError as error:
        problem = f"the replay took over {REPLAY_TIMEOUT_S:g} s and was killed"
        raise HTTPException(504, problem) from error
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


OWN = Path(__file__).parent / "page"
SHARED = OWN.parents[1] / "agent_server" / "page"
PAGE = [*sorted(OWN.iterdir()),
        *(SHARED / name for name in ("elements.js", "page.css"))]  # fmt: skip
"""Files of the page, including those shared with the chat page."""
TOKEN_VARIABLE = "VIEW_TOKEN"
MAX_POINTS = 600
"""Points of a curve on the page; longer curves keep the peaks of each stretch."""
MAX_PER_QUESTION = 60
"""Trajectories of one question shown side by side."""
HEADERS = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}


class Runs:
    """The data that the page requests."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs

    def __getitem__(self, number: int) -> Run:
        """Raise a 404 if there is no run with this number."""
        if not 0 <= number < len(self._runs):
            raise HTTPException(404, f"there is no run {number}")
        return self._runs[number]

    def summaries(self) -> list[dict[str, Any]]:
        return [run.summary() for run in self._runs]

    def names(self) -> list[str]:
        return sorted({name for run in self._runs for name in run.metrics.names()})

    def curves(
        self,
        name: Annotated[list[str], Query(max_length=64)],
        most: Annotated[int, Query(ge=4)] = MAX_POINTS,
    ) -> dict[str, Any]:
        """Return for each metric the steps and values of every run, at most `most` points each."""
        return {metric: [run.metrics.curve(metric, most) for run in self._runs] for metric in name}

    def trajectories(
        self, query: Annotated[TrajectoryQuery, Depends()], run: int = 0
    ) -> dict[str, Any]:
        """Return one page of a run's trajectories."""
        return find_trajectories(self[run].index, query)

    def question(self, uid: str, kind: str = "", run: int = 0) -> list[dict[str, Any]]:
        """Return the trajectories of one question over the steps, without their tokens."""
        rows = question_history(self[run].index, uid, kind, MAX_PER_QUESTION)
        trajectories = (
            self[run].trajectory(row["kind"], row["step"], row["line"], is_brief=True)
            for row in rows
        )
        return [trajectory for trajectory in trajectories if trajectory is not None]

    def trajectory(
        self, kind: str, step: NonNegative, line: NonNegative, run: int = 0
    ) -> dict[str, Any]:
        """Return one trajectory token by token. Raises a 404."""
        trajectory = self[run].trajectory(kind, step, line)
        if trajectory is None:
            raise HTTPException(404, f"there is no trajectory {kind} {step} {line}, or its file "
                                     "has just been replaced")  # fmt: skip
        return trajectory


def create_app(runs: Runs, token: str | None = None) -> FastAPI:
    """Return the application; with a `token`, it requires the token for all data of the runs."""

    def check_token(request: Request) -> None:
        if token and not has_token(request.headers.get("Authorization", ""), token):
            text = f"a bearer token is needed: the value of {TOKEN_VARIABLE} on the server"
            raise HTTPException(401, text, {"WWW-Authenticate": "Bearer"})

    async def replay(request: Request) -> Response:
        # A page of another site cannot send this type without a CORS preflight, which fails.
        if request.headers.get("Content-Type", "").partition(";")[0] != "application/json":
            raise HTTPException(415, "a replay must be requested as application/json")
        try:
            content = await read_body(request, MAX_REPLAY_BYTES, BODY_TIMEOUT_S)
        except DeadlineExceeded as error:
            raise HTTPException(408, str(error)) from error
        body = parse(content, ReplayRequest)
        return _json_response(await replays.replay(runs[body.run], body))

    replays = Replays()
    app = FastAPI(title="Search-R1 view", docs_url=None, redoc_url=None, openapi_url=None)
    api = APIRouter(prefix="/api", dependencies=[Depends(check_token)])
    handlers: dict[str, Callable[..., Any]] = {
        "runs": runs.summaries, "metrics": runs.names, "curves": runs.curves,
        "trajectories": runs.trajectories, "question": runs.question, "trajectory": runs.trajectory,
    }  # fmt: skip
    for name, handler in handlers.items():
        api.get(f"/{name}", response_model=None)(_as_json(handler))
    api.post("/replay", response_model=None)(replay)
    app.include_router(api)
    app.router.routes.extend(page_routes(PAGE))
    return app


def _as_json(handler: Callable[..., Any]) -> Callable[..., Response]:
    """Wrap a route's function with orjson: FastAPI's encoder visits every token's numbers again."""

    @functools.wraps(handler)
    def respond(*args: Any, **kwargs: Any) -> Response:
        return _json_response(handler(*args, **kwargs))

    return respond


def _json_response(data: Any) -> Response:
    return Response(orjson.dumps(data), media_type="application/json", headers=HEADERS)
