"""The settings of vLLM engines."""

import pytest

from verl.config import Config
from verl.rollout import vllm_build
from verl.rollout.vllm_settings import VllmSettings


def policy() -> Config:
    """Return the configuration of a run on the CPU."""
    config = Config()
    config.actor_rollout_ref.model.path = "policy"
    config.trainer.device = "cpu"
    return config


def on_gpu(max_num_seqs: int = 256, deterministic: bool = False) -> VllmSettings:
    config = policy()
    config.trainer.device, config.trainer.deterministic = "cuda", deterministic
    section = config.actor_rollout_ref
    section.rollout.dtype, section.rollout.max_num_seqs = "bfloat16", max_num_seqs
    return VllmSettings(config)


def test_a_deterministic_run_decodes_one_request_at_a_time() -> None:
    """Neither other requests in the batch nor cached prefixes may change the rounding."""
    config = policy()
    usual = VllmSettings(config).arguments()
    config.trainer.deterministic = True
    changes = {"max_num_seqs": 1, "enable_prefix_caching": False}
    assert VllmSettings(config).arguments() == {**usual, **changes}
    assert usual["max_num_seqs"] == 256


def test_batch_invariant_kernels_allow_batches_in_deterministic_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mode is enabled then; otherwise it is not, and requests are decoded one at a time."""
    monkeypatch.setattr(vllm_build, "is_batch_invariant", lambda device: True)
    many = on_gpu(deterministic=True)
    assert many.environment()["VLLM_BATCH_INVARIANT"] == "1"
    assert many.arguments()["max_num_seqs"] == 256
    assert many.arguments()["enable_prefix_caching"] is False
    assert many.arguments()["disable_custom_all_reduce"] is True
    monkeypatch.setattr(vllm_build, "is_batch_invariant", lambda device: False)
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


def test_the_users_arguments_win_and_null_is_left_to_vllm() -> None:
    """They are passed on as they are, beside those of the run."""
    settings = on_gpu()
    usual = settings.arguments()
    given = {"quantization": "fp8_per_tensor", "speculative_config": {"method": "ngram"}}
    settings.config.actor_rollout_ref.rollout.engine_kwargs = {**given, "swap_space": None}
    assert settings.arguments() == usual | given
    cpu = VllmSettings(policy())
    cpu.config.actor_rollout_ref.rollout.engine_kwargs = {"block_size": 64, "enforce_eager": False}
    assert (cpu.arguments()["block_size"], cpu.arguments()["enforce_eager"]) == (64, False)


def test_no_engine_takes_its_sampling_from_the_models_files() -> None:
    """Qwen2.5 ships a penalty and top_k in generation_config.json."""
    for settings in (VllmSettings(policy()), on_gpu()):
        assert settings.arguments()["generation_config"] == "vllm"


def test_only_an_engine_that_shares_its_card_can_sleep() -> None:
    """Sleep mode has a cost, which an engine with a card of its own need not pay."""
    config = policy()
    config.trainer.device = "cuda"
    assert VllmSettings(config).arguments()["enable_sleep_mode"]
    config.trainer.rollout_gpus = 1
    assert not VllmSettings(config).arguments()["enable_sleep_mode"]


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
