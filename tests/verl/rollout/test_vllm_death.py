"""A stopped or dead engine core is detected, whatever call is pending.

This file runs last of those that use the session's engine, since it kills the engine.
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
    """Return the process of the engine core."""
    (process,) = running.engine._core.processes
    return psutil.Process(process.pid)


def test_a_probe_is_answered_by_the_core_itself(session_vllm: Running) -> None:
    """A suspended core does not answer; it does once it is resumed."""
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


def test_the_death_of_the_core_ends_all_pending_calls(session_vllm: Running) -> None:
    """Requests, probes and weight updates all raise EngineDied."""
    running, core = session_vllm, core_of(session_vllm)

    async def body() -> None:
        core.suspend()  # so that the request is still running
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
