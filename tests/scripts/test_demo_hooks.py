"""What the demo adds to its run, with real servers and recorded rollouts."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from scripts.demo import EXAMPLE, bm25_over
from scripts.demo_hooks import SERVER_VARIABLE, Page, WithoutDocuments
from search_r1.retrieval.local_server import LocalServer
from tests.verl.trainer.recording import RecordingReplicas, prompts
from verl.config import Config, cli
from verl.rewards.interface import EachAlone, Reward
from verl.trainer.validate import Validation


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """The options of a run in the test's folder."""
    options = Config()
    options.trainer.default_local_dir = str(tmp_path)
    return options


def test_the_control_searches_an_empty_server_at_the_same_address(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its scores are written where the report reads them, and no server is left behind."""

    def found(url: str) -> int:
        (documents,) = httpx.post(url, json={"queries": ["capital of Norway"]}).json()["result"]
        return len(documents)

    with LocalServer(bm25_over(EXAMPLE / "corpus.jsonl")) as server:
        config.retriever.url = url = f"{server.url}/retrieve"
        assert found(url) > 0
        reward = EachAlone(lambda _: Reward(float(found(url)), {"em": float(found(url))}))
        engines = RecordingReplicas([])
        rows = Validation(config, engines, prompts(2), reward, 3)
        trainer: Any = SimpleNamespace(hooks=[rows], step=3, during=nullcontext, rollouts=engines)
        monkeypatch.setenv(SERVER_VARIABLE, str(server.pid))
        WithoutDocuments(config).on_end(trainer)
        assert server.status is not None
    row = json.loads((tmp_path / "empty" / "metrics.jsonl").read_text())
    assert (row["step"], row["val/em"], row["val/num_rows"]) == (3, 0.0, 2)
    assert (tmp_path / "empty" / "validation" / "step_3.jsonl").is_file()
    with pytest.raises(httpx.ConnectError):
        found(url)


def test_the_page_is_served_while_the_run_lasts(
    config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It shows the run's folder, also before the first metrics."""
    cli.write_resolved(config, str(tmp_path))
    trainer: Any = SimpleNamespace()
    with caplog.at_level("INFO"), Page(config).running(trainer):
        address = caplog.messages[-1].split()[-1]
        assert httpx.get(address).status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(address)
