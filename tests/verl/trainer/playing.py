"""Dialogues with the real agent and retrieval client, without Ray or a model."""

import asyncio
from collections.abc import Sequence

from search_r1.agent.generation import search_agent
from search_r1.retrieval.client import RetrievalClient
from tests.fakes import ByteTokenizer, ScriptedEngine
from tests.verl.rollout.instant import InstantRollouts
from verl.ext.retry import failed_positions
from verl.rollout.interface import RolloutEngine
from verl.types import Sampling, Trajectory


class InProcess(InstantRollouts):
    """Runs dialogues with the real agent and client; each searches twice, then answers."""

    def __init__(self, url: str, timeout: float) -> None:
        self.url = url
        self.timeout = timeout
        self.num_failed = 0

    def generate(self, starts: Sequence[Trajectory], sampling: Sampling) -> list[Trajectory]:
        finished = asyncio.run(self._play(starts, sampling))
        self.num_failed += len(failed_positions(finished))
        return finished

    def policy(self, start: Trajectory) -> RolloutEngine:
        """Return the scripted policy of a dialogue, with the current weight version."""
        policy = policy_of(start)
        policy.weight_version = self.version
        return policy

    async def _play(self, starts: Sequence[Trajectory], sampling: Sampling) -> list[Trajectory]:
        client = RetrievalClient(
            self.url, 1, timeout=self.timeout, max_retries=1, backoff=0.01, max_batch=2
        )  # fmt: skip
        async with client:
            agent = search_agent(client, ByteTokenizer())
            return await asyncio.gather(*(agent.run(s, self.policy(s), sampling) for s in starts))


def policy_of(start: Trajectory) -> ScriptedEngine:
    """Return the scripted policy of the dialogue with this seed."""
    searches = [f"<search>what of {start.seed}-{turn}</search>" for turn in (1, 2)]
    return ScriptedEngine([*searches, "<answer>a</answer>"])
