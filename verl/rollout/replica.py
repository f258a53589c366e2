"""One engine with its agent: turns started trajectories into finished ones.

A plain class, hosted by a Ray actor in training and used directly in tests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from verl.agent.interface import Agent
from verl.config import Config
from verl.rollout.vllm_engine import EngineConfig, EngineDied, VllmEngine
from verl.types import Sampling, Trajectory

__all__ = ["EngineDied", "RolloutReplica"]


class RolloutReplica:
    """A vLLM engine and the agent that uses it."""

    def __init__(
        self, config: Config, agent_factory: Callable[[Config], Agent], replica: int
    ) -> None:
        """Nothing heavy yet; `replica` numbers this engine among the run's."""
        self.engine_config = EngineConfig.from_config(config, replica)
        self.agent = agent_factory(config)
        self._engine: VllmEngine | None = None

    @property
    def engine(self) -> VllmEngine:
        """The running engine."""
        assert self._engine is not None, "call start() first"
        return self._engine

    def dtype(self) -> str:
        """What the engine computes in, for those who write weights for it."""
        return self.engine_config.dtype

    async def start(self) -> None:
        """Start the engine and load the model."""
        self._engine = VllmEngine(self.engine_config)

    async def rollout(self, starts: Sequence[Trajectory], sampling: Sampling) -> list[Trajectory]:
        """Finish `starts`, all at once, in their order; a failed search is not an exception."""
        runs = (self.agent.run(start, self.engine, sampling) for start in starts)
        return list(await asyncio.gather(*runs))

    async def probe(self) -> None:
        """Answer if actor and engine are alive. Raises EngineDied when the engine is not."""
        if self._engine is not None:
            await self._engine.probe()

    async def take(self, directory: str, version: int, is_adapter: bool) -> None:
        """Take what the ranks handed over, an adapter or all weights."""
        update = self.update_adapter if is_adapter else self.update_weights
        await update(directory, version)

    async def update_weights(self, weights_dir: str, version: int) -> None:
        """Take the weights of a Hugging Face folder; completions carry `version` from now on."""
        await self.engine.update_weights(weights_dir, version)

    async def update_adapter(self, adapter_dir: str, version: int) -> None:
        """Take the adapter of peft's folder, over the weights that the engine started with."""
        await self.engine.update_adapter(adapter_dir, version)

    async def sleep(self) -> None:
        """Give device memory to the trainer; nothing on CPU."""
        await self.engine.sleep()

    async def wake_up(self) -> None:
        """Take device memory back, with no weights unless an adapter's base; nothing on CPU."""
        await self.engine.wake_up()

    async def shutdown(self) -> None:
        """End the engine and its process; harmless if it never started or has ended."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.shutdown()
