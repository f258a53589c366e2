"""An engine whose core's process stops or dies says so, whatever it was asked.

The last file that uses the session's engine, which it kills.
"""

from __future__ import annotations

import asyncio

import psutil
import pytest

from tests.verl.rollout.engines import Running
from verl.rollout.interface import EngineDied
from verl.types import Sampling

pytestmark = pytest.mark.vllm_cpu


def core_of(running: Running) -> psutil.Process:
    """The process of the engine's core."""
    (process,) = running.engine._processes
    return psutil.Process(process.pid)


def test_a_probe_is_answered_by_the_core_itself(session_vllm: Running) -> None:
    """A core that stands still gives no sign of life, and does again when it goes on."""
    running, core = session_vllm, core_of(session_vllm)

    async def body() -> None:
        await running.engine.probe()
        core.suspend()
        probe = asyncio.ensure_future(running.engine.probe())
        done, _ = await asyncio.wait([probe], timeout=2.5)
        assert not done
        core.resume()
        await probe

    running.loop.run_until_complete(body())


def test_the_death_of_the_core_ends_all_that_waits_for_it(session_vllm: Running) -> None:
    """Requests, probes and new weights: none waits for ever, each tells the same."""
    running, core = session_vllm, core_of(session_vllm)

    async def body() -> None:
        core.suspend()  # so that the request is under way
        request = running.engine.generate((5, 6, 7), Sampling(max_tokens=500))
        waiting = [asyncio.ensure_future(call) for call in (request, running.engine.probe())]
        await asyncio.wait(waiting, timeout=1.0)
        core.kill()
        for call in waiting:
            with pytest.raises(EngineDied):
                await call
        with pytest.raises(EngineDied):
            await running.engine.update_weights("nowhere", 1)
        with pytest.raises(EngineDied):
            await running.engine.probe()

    running.loop.run_until_complete(body())
