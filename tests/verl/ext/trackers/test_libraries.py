"""MLflow, SwanLab and Trackio: without account or network, runs are local and can be resumed.

The packages are optional: the trackers' calls are tested on fakes and, where installed, on the real
packages (`slow`).
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sqlite3
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from verl.errors import ConfigError
from verl.monitor.tracking import LIBRARIES, Tracking

VARIABLES = ("MLFLOW_TRACKING_URI", "SWANLAB_MODE", "SWANLAB_LOG_DIR", "SWANLAB_API_KEY",
             "SWANLAB_SAVE_DIR", "TRACKIO_DIR", "TRACKIO_SPACE_ID")  # fmt: skip


@pytest.fixture(autouse=True)
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove all accounts and variables of the libraries."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name in ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


class MlflowError(Exception):
    """Fake of MLflow's exception."""


class Mlflow:
    """Fake of the module and of its client; with `is_away`, a step is refused."""

    def __init__(self) -> None:
        self.address, self.status, self.is_away = "", "", False
        self.params: dict[str, Any] = {}
        self.rows: list[tuple[dict[str, float], int]] = []
        self.created: list[tuple[str, str]] = []

    def set_tracking_uri(self, address: str) -> None:
        self.address = address

    def set_experiment(self, name: str) -> Any:
        return SimpleNamespace(experiment_id=name)

    def MlflowClient(self) -> Mlflow:
        return self

    def create_run(self, number: str, run_name: str) -> Any:
        self.created.append((number, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id="r1"))

    def update_run(self, run_id: str, status: str) -> None:
        self.status = status

    def set_terminated(self, run_id: str) -> None:
        self.status = "FINISHED"

    def log_params(self, params: dict[str, Any], run_id: str) -> None:
        self.params |= params

    def log_metrics(self, row: dict[str, float], step: int, run_id: str) -> None:
        if self.is_away:
            raise MlflowError("no route\nto host")
        self.rows.append((row, step))


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Mlflow:
    """Install a fake MLflow module."""
    module = Mlflow()
    monkeypatch.setitem(sys.modules, "mlflow", module)  # type: ignore[arg-type]
    return module


def test_mlflow_gets_options_once_and_every_step(mlflow: Mlflow, tmp_path: Path) -> None:
    """MLflow writes to the run's folder, with valid names; a resumed run continues its record."""
    with Tracking("p", "e", "mlflow", tmp_path, {"a": {"b": 1}, "c": []}) as tracking:
        tracking.log({"val/em@2": 0.5}, 1)
    assert mlflow.status == "FINISHED"
    with Tracking("p", "e", "mlflow", tmp_path, {"d": 1}, is_resumed=True) as tracking:
        assert mlflow.status == "RUNNING"
        tracking.log({"x": 1.0}, 2)
    assert mlflow.address == f"sqlite:///{tmp_path}/mlflow.db"
    assert mlflow.created == [("p", "e")] and mlflow.params == {"a.b": 1, "c": []}
    assert mlflow.rows == [({"val/em_2": 0.5}, 1), ({"x": 1.0}, 2)]


def test_an_unavailable_server_gets_all_steps_later(mlflow: Mlflow, tmp_path: Path) -> None:
    """With metrics.jsonl the run continues meanwhile."""
    with Tracking("p", "e", ["mlflow", "jsonl"], tmp_path) as tracking:
        mlflow.is_away = True
        tracking.log({"x": 1.0}, 1)
        tracking.log({"x": 2.0}, 2)
        mlflow.is_away = False
        tracking.log({"x": 3.0}, 3)
    assert mlflow.rows == [({"x": 1.0}, 1), ({"x": 2.0}, 2), ({"x": 3.0}, 3)]


class Session:
    """Fake module with `init`, `log` and `finish`, as SwanLab and Trackio have them."""

    def __init__(self) -> None:
        self.begun: list[dict[str, Any]] = []
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.ended = 0

    def init(self, **options: Any) -> Any:
        self.begun.append(options)
        return SimpleNamespace(name=options.get("name"), id="t1")

    def log(self, row: dict[str, float], step: int) -> None:
        self.rows.append((step, row))

    def finish(self) -> None:
        self.ended += 1


@pytest.mark.parametrize(
    ("name", "where"),
    [("swanlab", "swanlog"), ("trackio", "trackio")],
)
def test_a_session_is_begun_logged_to_and_ended(
    name: str,
    where: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Below the run's folder, offline, and resumed as the same run; how to view it is logged."""
    session = Session()
    monkeypatch.setitem(sys.modules, name, session)  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO):
        for is_resumed in (False, True):
            with Tracking("p", "e", name, tmp_path, {"a": 1}, is_resumed) as tracking:
                tracking.log({"x": 1.0}, 1 + is_resumed)
    first, again = session.begun
    assert (first.get("log_dir") or os.environ["TRACKIO_DIR"]) == str(tmp_path / where)
    assert first["project"] == "p" and first["config"] == {"a": 1}
    assert first.get("mode") in (None, "offline") and again["resume"] == "allow"
    assert first.get("id") == again.get("id")
    assert session.rows == [(1, {"x": 1.0}), (2, {"x": 1.0})] and session.ended == 2
    assert "swanlab sync" in caplog.text or "trackio show" in caplog.text


def test_variables_of_the_libraries_decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The libraries' own variables override the defaults; a key makes SwanLab online."""
    session = Session()
    monkeypatch.setitem(sys.modules, "swanlab", session)  # type: ignore[arg-type]
    monkeypatch.setenv("SWANLAB_LOG_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("SWANLAB_API_KEY", "k")
    Tracking("p", "e", "swanlab", tmp_path)
    monkeypatch.setenv("SWANLAB_MODE", "local")
    Tracking("p", "e", "swanlab", tmp_path)
    assert [options["mode"] for options in session.begun] == ["online", "local"]
    assert session.begun[0]["log_dir"] == str(tmp_path / "elsewhere")


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_missing_package_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has the command that installs it."""
    monkeypatch.setitem(sys.modules, name.replace("tensorboard", "tensorboard.summary"), None)
    with pytest.raises(ConfigError, match=f"pip install {name}"):
        Tracking("p", "e", name, tmp_path)


@pytest.fixture
def steps(tmp_path: Path) -> Iterator[Any]:
    """Log two steps from two starts of the same run."""

    def log(name: str) -> None:
        for number in (1, 2):
            resumed = number == 2
            with Tracking(
                "p", "e", [name, "jsonl"], tmp_path, {"a": {"b": 1}}, resumed
            ) as tracking:
                tracking.log({"val/em": number / 4, "n": float("nan")}, number)
        assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2

    yield log


@pytest.mark.slow
def test_the_real_mlflow(steps: Any, tmp_path: Path) -> None:
    """One run in the database has both steps and the options."""
    mlflow = pytest.importorskip("mlflow")
    steps("mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    [experiment] = client.search_experiments(filter_string="name = 'p'")
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.data.params == {"a.b": "1"}
    history = client.get_metric_history(run.info.run_id, "val/em")
    assert [(point.step, point.value) for point in history] == [(1, 0.25), (2, 0.5)]
    assert (tmp_path / "mlflow_run_id").read_text().strip() == run.info.run_id


@pytest.mark.slow
def test_the_real_swanlab(steps: Any, tmp_path: Path) -> None:
    """There is a folder per start with the values, which SwanLab's own `sync` uploads."""
    pytest.importorskip("swanlab")
    steps("swanlab")
    held = [path.read_bytes() for path in (tmp_path / "swanlog").rglob("*") if path.is_file()]
    for value in (0.25, 0.5):
        assert any(b"val/em" in data and struct.pack("<d", value) in data for data in held)


@pytest.mark.slow
def test_the_real_trackio(steps: Any, tmp_path: Path) -> None:
    """Its database has both steps."""
    if importlib.util.find_spec("trackio") is None:
        pytest.skip("no trackio")
    steps("trackio")
    with sqlite3.connect(tmp_path / "trackio" / "p.db") as db:
        rows = db.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step").fetchall()
    assert [(name, step, json.loads(row)["val/em"]) for name, step, row in rows] == [
        ("e", 1, 0.25), ("e", 2, 0.5)
    ]  # fmt: skip
