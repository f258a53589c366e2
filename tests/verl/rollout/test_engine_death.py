"""An engine whose core's process stops or dies says so, whatever it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from example.tiny import tiny_model
from verl.rollout.vllm_engine import EngineConfig, EngineDied, VllmEngine
from verl.types import Sampling

pytestmark = pytest.mark.vllm_cpu


@dataclass
class Running:
    """A started engine, its loop, and the process of its core."""

    loop: asyncio.AbstractEventLoop
    engine: VllmEngine
    core: psutil.Process


async def started(model: Path) -> VllmEngine:
    return VllmEngine(EngineConfig(str(model), max_model_len=1024, cpu_kv_cache_gib=1))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One engine for both tests; the second one kills it."""
    loop = asyncio.new_event_loop()
    before = set(psutil.Process().children())
    model = tiny_model(tmp_path_factory.mktemp("model"))
    engine = loop.run_until_complete(started(model))
    (core,) = [p for p in set(psutil.Process().children()) - before if "EngineCore" in p.name()]
    yield Running(loop, engine, core)
    loop.run_until_complete(engine.shutdown())
    loop.close()


def test_a_probe_is_answered_by_the_core_itself(running: Running) -> None:
    """A core that stands still gives no sign of life, and does again when it goes on."""

    async def body() -> None:
        await running.engine.probe()
        running.core.suspend()
        probe = asyncio.ensure_future(running.engine.probe())
        done, _ = await asyncio.wait([probe], timeout=2.5)
        assert not done
        running.core.resume()
        await probe

    running.loop.run_until_complete(body())


def test_the_death_of_the_core_ends_all_that_waits_for_it(running: Running) -> None:
    """Requests, probes and new weights: none waits for ever, each tells the same."""

    async def body() -> None:
        running.core.suspend()  # so that the request is under way
        request = running.engine.generate((5, 6, 7), Sampling(max_tokens=500))
        waiting = [asyncio.ensure_future(call) for call in (request, running.engine.probe())]
        await asyncio.wait(waiting, timeout=1.0)
        running.core.kill()
        for call in waiting:
            with pytest.raises(EngineDied):
                await call
        with pytest.raises(EngineDied):
            await running.engine.update_weights("nowhere", 1)
        with pytest.raises(EngineDied):
            await running.engine.probe()

    running.loop.run_until_complete(body())
