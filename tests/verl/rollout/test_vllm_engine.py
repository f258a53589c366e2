"""The settings of vLLM engines, and what their requests report."""

import asyncio
from typing import Any

import pytest
from transformers import GenerationConfig

from tests.verl.rollout.engines import Running
from verl.config import Config
from verl.errors import ModelError
from verl.nvidia import vllm_device
from verl.rollout import vllm_engine
from verl.rollout.vllm_engine import CPU_BLOCK, VllmEngine, VllmSettings
from verl.types import Completion, EngineCounts, Sampling


def policy() -> Config:
    """Return the configuration of a run on the CPU."""
    config = Config()
    config.actor_rollout_ref.model.path = "policy"
    config.trainer.device = "cpu"
    return config


def on_gpu(
    max_num_seqs: int = 256, lora_rank: int = 0, deterministic: bool = False
) -> VllmSettings:
    config = policy()
    config.trainer.device, config.trainer.deterministic = "cuda", deterministic
    section = config.actor_rollout_ref
    section.rollout.dtype, section.rollout.max_num_seqs = "bfloat16", max_num_seqs
    section.model.lora_rank = lora_rank
    return VllmSettings(config)


def test_a_deterministic_run_decodes_one_request_at_a_time() -> None:
    """Neither other requests in the batch nor cached prefixes may change the rounding."""
    config = policy()
    usual = VllmSettings(config).arguments()
    config.trainer.deterministic = True
    changes = {"max_num_seqs": 1, "enable_prefix_caching": False}
    assert VllmSettings(config).arguments() == {**usual, **changes}
    assert usual["max_num_seqs"] == 256


@pytest.mark.skipif(not vllm_device(), reason="needs vLLM")
def test_vllm_built_for_another_device_is_rejected() -> None:
    """A CPU run with the GPU build would fill card 0; the reverse fails without a clear error."""
    config = policy()
    config.trainer.device = {"cpu": "cuda", "cuda": "cpu"}[vllm_device()]
    with pytest.raises(ModelError, match=r"got vLLM's .* build, expected its"):
        asyncio.run(VllmEngine(config).start())


@pytest.mark.parametrize(
    ("vllm", "capability", "chosen", "expected"),
    [("0.33.0", (8, 0), None, True), ("0.33.0", (8, 9), "1", True), ("0.33.0", (9, 0), None, True),
     ("0.33.0", (9, 0), "0", False), ("0.33.0", (7, 5), None, False),
     ("0.33.0", (7, 0), "1", False), ("0.26.0", (8, 6), None, True), ("", (8, 6), None, True),
     ("0.19.1", (8, 0), None, True), ("0.19.1", (8, 6), None, False),
     ("0.19.1", (8, 9), None, True), ("0.19.1", (9, 0), None, True),
     ("0.19.1", (10, 0), None, True), ("0.19.1", (7, 5), None, False)],
)  # fmt: skip
def test_batch_invariant_kernels_need_a_card_that_supports_them(
    vllm: str,
    capability: tuple[int, int],
    chosen: str | None,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM itself accepts the mode on any card; the user may disable it. 0.19 covers fewer."""
    monkeypatch.setattr(vllm_engine, "version_of", lambda package: vllm)
    monkeypatch.setattr(vllm_engine.torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    if chosen is not None:
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", chosen)
    assert vllm_engine.has_batch_invariant_kernels("cuda") is expected
    assert vllm_engine.has_batch_invariant_kernels("cpu") is False


def test_batch_invariant_kernels_allow_batches_in_deterministic_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mode is enabled then; otherwise it is not, and requests are decoded one at a time."""
    monkeypatch.setattr(vllm_engine, "has_batch_invariant_kernels", lambda device: True)
    many = on_gpu(deterministic=True)
    assert many.environment()["VLLM_BATCH_INVARIANT"] == "1"
    assert many.arguments()["max_num_seqs"] == 256
    assert many.arguments()["enable_prefix_caching"] is False
    assert many.arguments()["disable_custom_all_reduce"] is True
    monkeypatch.setattr(vllm_engine, "has_batch_invariant_kernels", lambda device: False)
    alone = on_gpu(deterministic=True)
    assert "VLLM_BATCH_INVARIANT" not in alone.environment()
    assert alone.arguments()["max_num_seqs"] == 1


def test_the_maximum_tokens_of_a_step_are_those_of_the_memory_estimate() -> None:
    """vLLM's default is 2,048. On the CPU, a step must be able to process the longest prompt."""
    assert on_gpu().arguments()["max_num_batched_tokens"] == 8192
    assert on_gpu(max_num_seqs=9000).arguments()["max_num_batched_tokens"] == 9000
    config = policy()
    config.data.max_prompt_length = 10000 - config.data.max_response_length
    assert VllmSettings(config).arguments()["max_num_batched_tokens"] == 10000


def test_quantization_has_vllms_names() -> None:
    """vLLM's own `fp8` accepts only files that are quantized already."""
    settings = on_gpu()
    plain = settings.arguments()
    assert (plain["quantization"], plain["kv_cache_dtype"]) == (None, "auto")
    rollout = settings.config.actor_rollout_ref.rollout
    rollout.quantization, rollout.kv_cache_dtype = "fp8", "fp8"
    quantized = settings.arguments()
    assert (quantized["quantization"], quantized["kv_cache_dtype"]) == ("fp8_per_tensor", "fp8")


def test_no_engine_takes_its_sampling_from_the_models_files() -> None:
    """Qwen2.5 ships a penalty and top_k in generation_config.json."""
    for settings in (VllmSettings(policy()), on_gpu(), on_gpu(lora_rank=8)):
        assert settings.arguments()["generation_config"] == "vllm"


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


@pytest.mark.parametrize(("lora_rank", "expected"), [(0, "dummy"), (8, "auto")])
def test_only_the_base_of_an_adapter_is_read_at_the_start(
    lora_rank: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole weights are sent before the first request; outside of training they never are."""
    engine, asked = VllmEngine(on_gpu(lora_rank=lora_rank).config), []

    async def start() -> None:
        asked.append(engine.settings.arguments()["load_format"])

    monkeypatch.setattr(engine, "start", start)
    assert engine.settings.arguments()["load_format"] == "auto"
    asyncio.run(engine.start_for_training())
    assert asked == [expected]


def test_only_an_engine_that_shares_its_card_can_sleep() -> None:
    """Sleep mode has a cost, which an engine with a card of its own need not pay."""
    config = policy()
    config.trainer.device = "cuda"
    assert VllmSettings(config).arguments()["enable_sleep_mode"]
    config.trainer.rollout_gpus = 1
    assert not VllmSettings(config).arguments()["enable_sleep_mode"]


def test_only_the_base_weights_of_an_adapter_are_kept_in_sleep() -> None:
    """Whole weights are loaded after each sleep, so that a copy would be overwritten."""
    assert on_gpu().sleep_level == 2
    assert on_gpu(lora_rank=8).sleep_level == 1


@pytest.mark.parametrize(
    ("batch", "n_agent", "validated", "replicas", "gpu", "cpu"),
    [
        (512, 5, 256, None, 320, 256),  # the GRPO recipe on 8 GPUs
        (512, 1, 256, None, 64, 256),
        (10, 4, 8, None, 8, 40),  # two engines get two groups each
        (2, 4, 8, None, 1, 8),  # groups are divided if engines would be idle
        (8, 1, 80, 1, 80, 80),  # a validation request is larger
        (4096, 1, 8, None, 512, 256),
    ],
)
def test_an_engine_decodes_its_whole_share_at_once(
    batch: int, n_agent: int, validated: int, replicas: int | None, gpu: int, cpu: int
) -> None:
    """The larger of its shares of a step and of a validation request, within bounds."""
    config = policy()
    config.trainer.n_gpus_per_node = 8
    config.data.train_batch_size, config.data.val_batch_size = batch, validated
    rollout = config.actor_rollout_ref.rollout
    rollout.n_agent, rollout.num_replicas = n_agent, replicas
    assert (config.max_num_seqs(on_gpu=True), config.max_num_seqs(on_gpu=False)) == (gpu, cpu)
    rollout.max_num_seqs = 7
    assert (config.max_num_seqs(on_gpu=True), config.max_num_seqs(on_gpu=False)) == (7, 7)


@pytest.mark.vllm_cpu
def test_a_request_reports_how_long_it_waited_for_a_slot(vllm: Running) -> None:
    """Requests beyond the engine's slots wait longest, until another request ends."""
    engine: Any = vllm.engine
    number = engine.settings.max_num_seqs

    async def ask_all() -> list[Completion]:
        # Long enough that all requests arrive before the first one ends.
        requests = (engine.generate([5 + i % 50, 7], Sampling(12)) for i in range(number + 3))
        return list(await asyncio.gather(*requests))

    waited = [completion.queued_s for completion in vllm.loop.run_until_complete(ask_all())]
    assert sorted(waited)[-3:] == sorted(waited[-3:]) and min(waited[-3:]) > min(waited) >= 0
    assert vllm.generate([5]).queued_s < min(waited[-3:])


@pytest.mark.vllm_cpu
def test_a_request_reports_how_much_of_its_prompt_was_cached(vllm: Running) -> None:
    """A second sample's prompt, and the next turn's dialogue so far, are cached in whole blocks.

    Nothing is cached after a weight update.
    """
    prompt = [5 + i % 50 for i in range(300)]
    first, second = vllm.generate(prompt), vllm.generate(prompt)
    context = [*prompt, *first.ids]
    assert first.counts == EngineCounts(300, 0)
    assert second.counts == EngineCounts(300, 300 // CPU_BLOCK * CPU_BLOCK)
    cached = (len(context) - 1) // CPU_BLOCK * CPU_BLOCK  # the last token was never computed
    assert vllm.generate([*context, 7]).counts == EngineCounts(len(context) + 1, cached)
    vllm.reset()
    assert vllm.generate(prompt).counts == EngineCounts(300, 0)
