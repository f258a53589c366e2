"""A thousand episodes through the gateway are those of the native agent; what a turn costs."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.gateway.episodes import (
    StreamedEngine,
    loop_agent,
    native_agent,
    play_all,
    scripts,
    search_loop,
    streamed_loop,
)
from tests.gateway.test_agent import check_equality
from verl.agent.interface import Agent

NUM_EPISODES = 1000


@pytest.mark.parametrize("loop", [search_loop, streamed_loop])
def test_a_thousand_episodes_are_equal(loop: Callable[..., Any]) -> None:
    """Ids, origins, log-probs, status and statistics."""
    check_equality(loop, NUM_EPISODES)


def test_a_turn_costs_milliseconds() -> None:
    """Seconds of CPU per turn beyond the native agent's; the loop's own client is counted."""
    dialogues = scripts(200)

    def seconds(agent: Agent, dialogues: Sequence[Sequence[str]]) -> float:
        asyncio.run(play_all(agent, dialogues[:8], StreamedEngine))  # imports, and the server
        began = time.process_time()
        played = asyncio.run(play_all(agent, dialogues, StreamedEngine))
        return (time.process_time() - began) / sum(t.stats["turns"] for t in played)

    native, whole, streamed = (
        seconds(agent, dialogues)
        for agent in (native_agent(), loop_agent(search_loop), loop_agent(streamed_loop))
    )
    costs = {"native": native, "whole": whole, "streamed": streamed}
    sys.stdout.write(f"CPU ms a turn: { {name: round(1000 * s, 2) for name, s in costs.items()} }")
    assert whole - native < 0.05
