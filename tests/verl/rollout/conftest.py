"""Engines that tests share, since starting one takes seconds."""

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
from verl.rollout import vllm_engine
from verl.rollout.interface import build_engine

PLAIN = ("TORCHDYNAMO_DISABLE", "1")
"""vLLM compiles its count of likelier tokens at each start, for seconds; in the first real run of
`tests/test_end_to_end.py` it does."""


def children() -> set[psutil.Process]:
    """Processes below this one that run, the resource tracker's apart."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # or a zombie
            if "resource_tracker" not in " ".join(process.cmdline()):
                found.add(process)
    return found


def started(name: str, folder: Path) -> Iterator[Running]:
    """The engine `name` with a model in `folder`, until the tests are over."""
    tokenizer = save_model(folder, seed=0)
    loop = asyncio.new_event_loop()
    engine = build_engine(tiny_config(folder, name))
    loop.run_until_complete(engine.start())
    yield Running(loop, engine, tokenizer, folder)
    loop.run_until_complete(engine.shutdown())
    loop.close()


@pytest.fixture(scope="session")
def session_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One vLLM engine; the tests of `test_vllm_death.py`, which come last, kill it."""
    before = children()
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as sockets:
        patch.setenv(*PLAIN)
        patch.setenv(vllm_engine.SOCKETS, sockets)
        patch.setattr(vllm_engine, "WORKER_EXTENSION", "tests.verl.rollout.forgetting.Forgetting")
        for running in started("vllm", tmp_path_factory.mktemp("vllm")):
            its_own = children() - before
            assert any(path.is_socket() for path in Path(sockets).rglob("*"))
            yield running
        assert not os.listdir(sockets), "the engine left sockets behind"
    assert not children() & its_own, "the engine left processes behind"


@pytest.fixture(scope="session")
def session_transformers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One engine of transformers."""
    yield from started("transformers", tmp_path_factory.mktemp("transformers"))


@pytest.fixture
def vllm(session_vllm: Running) -> Running:
    """The shared engine with the weights of its start."""
    session_vllm.reset()
    return session_vllm


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests that kill the session's engine come last, in whatever order they were named."""
    items.sort(key=lambda item: "test_vllm_death" in item.nodeid)
