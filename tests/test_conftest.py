"""The hooks of `conftest.py`: hidden GPUs, skipped tests, and files of one process."""

import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from tests import conftest

ROOT = Path(__file__).parents[1]


def item(*marks: str) -> Mock:
    """Return a collected test with these markers."""
    return Mock(get_closest_marker=lambda name: name if name in marks else None)


@pytest.mark.parametrize(("marks", "seen"), [((), ""), (("gpu",), "0")])
def test_cards_are_hidden_unless_a_gpu_test_was_chosen(
    marks: tuple[str, ...], seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise `device=auto` in a CPU test would take GPU 0 from another process."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    conftest.pytest_collection_finish(SimpleNamespace(items=[item(), item(*marks)]))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen


@pytest.mark.parametrize(("build", "skipped"), [("cpu", False), ("cuda", True), ("", True)])
def test_engines_on_the_cpu_need_the_cpu_build(
    build: str, skipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With vLLM's GPU build, tests of CPU engines are skipped with the reason; the others run."""
    monkeypatch.setattr(conftest, "vllm_device", lambda: build)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    plain, engine = item(), item("vllm_cpu")
    conftest.pytest_collection_finish(SimpleNamespace(items=[plain, engine]))
    assert engine.add_marker.called is skipped and not plain.add_marker.called


def test_files_that_share_an_engine_go_to_one_process() -> None:
    """Files that share ranks do too; each other file is a unit of its own, and all paths exist."""
    scope = partial(conftest.Together._split_scope, Mock())
    engines = {scope(f"tests/verl/rollout/test_{name}.py::test_x[1]") for name in "ab"}
    ranks = {scope(f"tests/verl/{name}.py::test_x")
             for name in ("ext/lora/test_lora", "checkpoint/test_shards")}  # fmt: skip
    assert len(engines) == len(ranks) == 1 and engines != ranks
    assert (
        scope("tests/verl/checkpoint/test_saver.py::test_x")
        == "tests/verl/checkpoint/test_saver.py"
    )
    assert all((ROOT / path).exists() for paths in conftest.TOGETHER for path in paths)
