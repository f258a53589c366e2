"""vLLM with the policy's adapter on its base, in place of merged weights."""

from __future__ import annotations

from typing import Any

from verl.config import Config
from verl.config.policy import VLLM_LORA_RANKS
from verl.rollout.vllm_engine import VllmEngine
from verl.rollout.vllm_settings import VllmSettings


class AdapterSettings(VllmSettings):
    """The settings of an engine that loads adapters."""

    sleep_level = 1
    """The base weights must be kept, since only the adapter is updated."""

    def arguments(self) -> dict[str, Any]:
        """Return vLLM's arguments, with room for one adapter of the run's rank."""
        rank = self.config.actor_rollout_ref.model.lora_rank
        max_rank = next(size for size in VLLM_LORA_RANKS if size >= rank)
        return super().arguments() | {
            "enable_lora": True, "max_loras": 1, "max_lora_rank": max_rank,
        }  # fmt: skip


class AdapterEngine(VllmEngine):
    """An engine whose weights are the base, and whose updates are adapters in peft folders."""

    takes_adapters = True

    def __init__(self, config: Config, replica: int = 0) -> None:
        super().__init__(config, replica)
        self.settings = AdapterSettings(config, replica)

    async def start_for_training(self) -> None:
        """Start with the weights of the base, which is never sent."""
        await self.start()

    async def update_weights(self, folder: str, version: int) -> None:
        """Load an adapter under a new id, since vLLM never reloads an adapter that it knows."""
        from vllm.lora.request import LoRARequest  # noqa: PLC0415 - not before the engine starts

        old = self._request_options.get("lora_request")
        if old is not None:
            await self._core.result(self._llm.remove_lora(old.lora_int_id))
        adapter = LoRARequest(f"version-{version}", version, folder)
        self._request_options = {"lora_request": adapter}
        await self._core.result(self._llm.add_lora(adapter))
        await self._reset_prefix_cache()
        self.weight_version = version
