"""How vLLM engines start, and what their requests report."""

import asyncio
from typing import Any

import pytest
from transformers import GenerationConfig

from tests.verl.rollout.engines import Running
from tests.verl.rollout.test_vllm_settings import on_gpu, policy
from verl.errors import ModelError
from verl.nvidia import vllm_device
from verl.rollout.interface import build_engine
from verl.rollout.vllm_engine import VllmEngine
from verl.rollout.vllm_settings import CPU_BLOCK
from verl.types import Completion, Sampling


@pytest.mark.skipif(not vllm_device(), reason="needs vLLM")
def test_vllm_built_for_another_device_is_rejected() -> None:
    """A CPU run with the GPU build would fill card 0; the reverse fails without a clear error."""
    config = policy()
    config.trainer.device = {"cpu": "cuda", "cuda": "cpu"}[vllm_device()]
    with pytest.raises(ModelError, match=r"got vLLM's .* build, expected its"):
        asyncio.run(VllmEngine(config).start())


@pytest.mark.vllm_cpu
def test_the_end_tokens_of_the_models_files_still_count(vllm: Running) -> None:
    """vLLM reads them from generation_config.json whatever decides its sampling."""
    engine: Any = vllm.engine
    config = engine._llm.model_config
    saved = {"eos_token_id": [3, 4], "repetition_penalty": 1.1, "top_k": 20}
    with pytest.MonkeyPatch.context() as patch:
        read = GenerationConfig(**saved)
        patch.setattr("vllm.config.model.try_get_generation_config", lambda *_, **__: read)
        assert config.get_diff_sampling_param() == {}
        assert config.try_get_generation_config()["eos_token_id"] == [3, 4]


@pytest.mark.parametrize(("lora_rank", "expected"), [(0, ("dummy", 2)), (8, ("auto", 1))])
def test_only_the_base_of_an_adapter_is_read_at_the_start_and_kept_in_sleep(
    lora_rank: int, expected: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole weights are sent before the first request; outside of training they never are."""
    config = on_gpu().config
    config.actor_rollout_ref.model.lora_rank = lora_rank
    engine: Any = build_engine(config)
    asked: list[tuple[str, int]] = []

    async def start() -> None:
        asked.append((engine.settings.arguments()["load_format"], engine.settings.sleep_level))

    monkeypatch.setattr(engine, "start", start)
    assert engine.settings.arguments()["load_format"] == "auto"
    asyncio.run(engine.start_for_training())
    assert asked == [expected]


@pytest.mark.vllm_cpu
def test_a_request_reports_how_long_it_waited_for_a_slot(vllm: Running) -> None:
    """Requests beyond the engine's slots wait longest, until another request ends."""
    engine: Any = vllm.engine
    number = engine.settings.max_num_seqs

    async def ask_all() -> list[Completion]:
        # Long enough that all requests arrive before the first one ends.
        requests = (engine.generate([5 + i % 50, 7], Sampling(12)) for i in range(number + 3))
        return list(await asyncio.gather(*requests))

    waited = [
        completion.measured.queued_s for completion in vllm.loop.run_until_complete(ask_all())
    ]
    assert sorted(waited)[-3:] == sorted(waited[-3:]) and min(waited[-3:]) > min(waited) >= 0
    assert vllm.generate([5]).measured.queued_s < min(waited[-3:])


def tokens(completion: Completion) -> tuple[int, int]:
    """Return how many tokens of the prompt the engine reports, and how many were cached."""
    return completion.measured.num_prompt, completion.measured.num_cached


@pytest.mark.vllm_cpu
def test_a_request_reports_how_much_of_its_prompt_was_cached(vllm: Running) -> None:
    """A second sample's prompt, and the next turn's dialogue so far, are cached in whole blocks.

    Nothing is cached after a weight update.
    """
    prompt = [5 + i % 50 for i in range(300)]
    first, second = vllm.generate(prompt), vllm.generate(prompt)
    context = [*prompt, *first.ids]
    assert tokens(first) == (300, 0)
    assert tokens(second) == (300, 300 // CPU_BLOCK * CPU_BLOCK)
    cached = (len(context) - 1) // CPU_BLOCK * CPU_BLOCK  # the last token was never computed
    assert tokens(vllm.generate([*context, 7])) == (len(context) + 1, cached)
    vllm.reset()
    assert tokens(vllm.generate(prompt)) == (300, 0)
