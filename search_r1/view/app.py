"""The page's application: what it asks for, as JSON, and its files. It answers GET only, but
for replays.

A request names a run by its number, never a path.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query, Request, Response

from search_r1.bearer import has_token
from search_r1.search.server.pages import page_routes
from search_r1.view.alarms import alarms
from search_r1.view.finding import Wanted, Whole, find, over_steps
from search_r1.view.replaying import Asked, Replays
from search_r1.view.run import Run, compared

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
        """Every run in short, the others named by their numbers."""
        return [run.about() for run in self._runs]

    def names(self) -> list[str]:
        """Every metric of any run."""
        return sorted({name for run in self._runs for name in run.metrics.names()})

    def curves(
        self,
        name: Annotated[list[str], Query(max_length=64)],
        most: Annotated[int, Query(ge=4)] = MOST_POINTS,
    ) -> dict[str, Any]:
        """Steps and values of each metric, of every run."""
        return {one: [run.metrics.curve(one, most) for run in self._runs] for one in name}

    def alarms(self) -> list[list[dict[str, Any]]]:
        """The guard's alarms of every run."""
        return [[asdict(one) for one in alarms(run.metrics, run.config)] for run in self._runs]

    def config(self) -> list[dict[str, Any]]:
        """Every option with each run's value."""
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
