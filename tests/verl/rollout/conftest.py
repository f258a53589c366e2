"""Engines shared by the tests, since starting one takes seconds."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.verl.rollout.engines import Running, save_model, tiny_config
from verl.rollout import vllm_engine, vllm_settings
from verl.rollout.interface import build_engine

PLAIN = ("TORCHDYNAMO_DISABLE", "1")
"""Disables the compilation of vLLM's rank kernel, which takes seconds at each start. The first real
run of `tests/test_end_to_end.py` compiles it."""


def children() -> set[psutil.Process]:
    """Return the running descendants of this process, except the resource tracker."""
    processes = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # also raised for zombies
            if "resource_tracker" not in " ".join(process.cmdline()):
                processes.add(process)
    return processes


def started(name: str, folder: Path) -> Iterator[Running]:
    """Start the engine `name` with a model in `folder`; stop it after the tests."""
    tokenizer = save_model(folder, seed=0)
    loop = asyncio.new_event_loop()
    engine = build_engine(tiny_config(folder, name))
    loop.run_until_complete(engine.start_for_training())
    yield Running(loop, engine, tokenizer, folder)
    loop.run_until_complete(engine.shutdown())
    loop.close()


@pytest.fixture(scope="session")
def session_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A vLLM engine; the tests of `test_vllm_death.py`, which run last, kill it."""
    before = children()
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as sockets:
        patch.setenv(*PLAIN)
        patch.setenv(vllm_engine.SOCKETS, sockets)
        patch.setattr(vllm_settings, "WORKER_EXTENSION", "tests.verl.rollout.forgetting.Forgetting")
        for running in started("vllm", tmp_path_factory.mktemp("vllm")):
            own_processes = children() - before
            assert any(path.is_socket() for path in Path(sockets).rglob("*"))
            yield running
        assert not os.listdir(sockets), "the engine left sockets behind"
    assert not children() & own_processes, "the engine left processes behind"


@pytest.fixture(scope="session")
def session_transformers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A transformers engine."""
    yield from started("transformers", tmp_path_factory.mktemp("transformers"))


@pytest.fixture
def vllm(session_vllm: Running) -> Running:
    """The shared vLLM engine, reset to its original weights."""
    session_vllm.reset()
    return session_vllm


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests that kill the session's engine last."""
    items.sort(key=lambda item: "test_vllm_death" in item.nodeid)
