"""Whether the hub answers, and what is refused because it does not."""

import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path

import datasets
import pytest
from huggingface_hub import constants

from search_r1.datasets import hub, published
from search_r1.inference.agent_options import AgentOptions
from search_r1.inference.model_name import check_names
from search_r1.retrieval.index_builder import BuildConfig, build_index
from verl import hub_access
from verl.errors import UserError
from verl.hub_access import hub_problem
from verl.ports import free_port


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub at a port at which nothing listens."""
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub_access, "getproxies", dict)


def test_a_hub_that_listens_has_no_problem(
    unreachable: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither has one that is not asked: offline, or behind a proxy."""
    assert "127.0.0.1 does not answer" in hub_problem()
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert hub_problem() == ""
    monkeypatch.setattr(hub_access, "getproxies", lambda: {"https": "http://proxy"})
    assert hub_problem() == ""


def encoder(folder: Path) -> None:
    corpus = folder / "corpus.jsonl"
    corpus.write_text('{"id": "0", "contents": "a"}\n')
    build_index(BuildConfig("e5", str(corpus), str(folder), model_path="intfloat/e5-base-v2"))


@pytest.mark.parametrize(
    "use",
    [
        lambda _: hub.list_files("some/set", "part"),
        lambda _: list(published.read_split(published.SETS["nq"], "train")),
        lambda _: check_names(AgentOptions(model="no-such/model")),
        encoder,
    ],
    ids=["download", "question set", "model", "encoder"],
)
def test_without_the_hub_a_command_ends_at_once(
    use: Callable[[Path], object], unreachable: None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Its library would try six times, for half a minute, and show each of them twice."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    start = time.monotonic()
    with pytest.raises(UserError, match="expected"):
        use(tmp_path)
    assert time.monotonic() - start < 5
    assert not logging.getLogger("huggingface_hub").handlers
