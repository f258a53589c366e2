"""A complete run whose retriever stops within a step: real agent, client and server, fake ranks."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from search_r1.agent.retriever import ServedSearch
from search_r1.retrieval.server import create_app
from tests.apps import running
from tests.compare import read_rows
from tests.fakes import ScriptedEngine
from tests.retrieval.service.fake_backends import FakeBackend
from tests.verl.trainer.playing import InProcess
from tests.verl.trainer.recording import build_trainer, grpo_config
from verl.agent.environment import Environment
from verl.checkpoint import folders
from verl.errors import ToolOutage, ToolRefused
from verl.ext import retry
from verl.monitor.tracking import JsonlTracker, Tracking
from verl.types import Completion, Sampling, Trajectory

DISTURBED = ("perf/", "timing_", "fault/", "val/fault/")


class Server:
    """A retriever that can be stopped and started again on the same port."""

    def __init__(self) -> None:
        self._open = contextlib.ExitStack()
        self.port = 0
        self.start()

    def start(self, token: str | None = None) -> None:
        app = create_app(FakeBackend(), token=token)
        self.url = self._open.enter_context(running(app, self.port))
        self.port = int(self.url.rpartition(":")[2])

    def stop(self) -> None:
        self._open.close()


@dataclasses.dataclass
class StoppingPolicy:
    """A policy during whose second turn the server stops."""

    policy: ScriptedEngine
    server: Server
    new_token: str | None
    """The server restarts and requires this token; None: it stays stopped."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        completion = await self.policy.generate(prompt_ids, sampling)
        if len(self.policy.requests) == 2:
            self.server.stop()
            if self.new_token:
                self.server.start(self.new_token)
        return completion


class Engines(InProcess):
    """Replaces the replicas; the server stops while one group of step 2 is sampled."""

    def __init__(self, server: Server, stops: bool, new_token: str | None) -> None:
        super().__init__(server.url, 60.0)
        self.server, self.stops, self.new_token = server, stops, new_token

    def policy(self, start: Trajectory) -> Any:
        if not (self.stops and start.group == "2/1" and start.sample == 1):
            return super().policy(start)
        self.stops = False
        return StoppingPolicy(super().policy(start), self.server, self.new_token)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(retry, "POLL_S", 0.01)
    server = Server()
    yield server
    server.stop()


def train(
    folder: Path, server: Server, *, stops: bool = False, comes_back: bool = False,
    new_token: str | None = None,
) -> None:  # fmt: skip
    """Run three validated steps; with `comes_back`, the server restarts when a probe fails."""
    config = grpo_config(folder)
    config.trainer.test_freq = 1
    config.trainer.resume_mode = "auto"
    config.actor_rollout_ref.actor.ppo_mini_batch_size = 8
    config.retriever.url = server.url
    config.retriever.max_outage = 60.0 if comes_back else 0.1

    class RestartingSearch(ServedSearch):
        def probe(self, seconds: float) -> str:
            problem = super().probe(seconds)
            if problem and comes_back:
                server.start()
            return problem

    with Tracking("p", "e", [JsonlTracker(folder)], str(folder)) as tracking:
        build_trainer(
            config, [], rollouts=Engines(server, stops, new_token), logger=tracking,
            environment=Environment((RestartingSearch(config.retriever),)),
            total_steps=3,
        ).fit()  # fmt: skip


def logged(folder: Path) -> list[dict[str, Any]]:
    """Return all metrics except those of the machine and of the disturbance."""
    rows = read_rows(folder / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(DISTURBED)} for row in rows]


def faults(folder: Path) -> list[dict[str, Any]]:
    rows = read_rows(folder / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k.startswith("fault/")} for row in rows]


def test_line_19_a_retriever_that_comes_back_leaves_the_run_as_it_was(
    server: Server, tmp_path: Path
) -> None:
    """Stopped while step 2 is sampled, later back on its port: all metrics are equal."""
    train(tmp_path / "undisturbed", server)
    train(tmp_path / "disturbed", server, stops=True, comes_back=True)
    assert logged(tmp_path / "disturbed") == logged(tmp_path / "undisturbed")
    counts = faults(tmp_path / "disturbed")
    assert counts[2]["fault/outage_s"] > 0 == counts[2]["fault/trajectories_dropped"]
    assert counts[2]["fault/trajectories_resampled"] == counts[2]["fault/searches_failed"] > 0
    for undisturbed in (*faults(tmp_path / "undisturbed")[1:], counts[1], counts[3]):
        assert set(undisturbed.values()) == {0}


def test_a_retriever_that_stays_away_costs_the_step_only(server: Server, tmp_path: Path) -> None:
    """The first step is saved; with the server back, the same command runs the other two."""
    train(tmp_path / "undisturbed", server)
    folder = tmp_path / "disturbed"
    with pytest.raises(ToolOutage, match=r"max_outage=0\.1.*global_step_1.*resume_mode=auto"):
        train(folder, server, stops=True)
    found = folders.latest(folder)
    assert found is not None and folders.step_of(found) == 1
    server.start()
    train(folder, server)
    assert logged(folder) == logged(tmp_path / "undisturbed")


def test_a_retriever_that_begins_to_refuse_costs_the_step_only(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It requires a token within step 2: one line and a checkpoint; with the token, the rest."""
    monkeypatch.delenv("RETRIEVER_TOKEN", raising=False)
    train(tmp_path / "undisturbed", server)
    folder = tmp_path / "refused"
    with pytest.raises(ToolRefused, match=r"401.*RETRIEVER_TOKEN.*global_step_1.*resume_mode=auto"):
        train(folder, server, stops=True, new_token="planted-93")
    monkeypatch.setenv("RETRIEVER_TOKEN", "planted-93")
    train(folder, server)
    assert logged(folder) == logged(tmp_path / "undisturbed")
