"""What an engine is told; nothing here starts one."""

from dataclasses import replace

import pytest

from verl.config import Config
from verl.errors import ModelError
from verl.packages import vllm_device
from verl.workers.rollout.vllm_engine import EngineConfig, VllmEngine


def test_a_deterministic_run_decodes_one_request_at_a_time() -> None:
    """Neither a neighbour in the batch nor a cached prefix may change a request's last bits."""
    config = Config()
    config.actor_rollout_ref.model.path = "policy"
    config.trainer.device = "cpu"
    usual = EngineConfig.from_config(config)
    config.trainer.deterministic = True
    alone = EngineConfig.from_config(config)
    assert alone == replace(usual, deterministic=True)
    wanted = {"max_num_seqs": 1, "enable_prefix_caching": False}
    assert alone.vllm_arguments() == {**usual.vllm_arguments(), **wanted}
    assert usual.vllm_arguments()["max_num_seqs"] == config.actor_rollout_ref.rollout.max_num_seqs


@pytest.mark.skipif(not vllm_device(), reason="needs vLLM")
def test_the_other_devices_build_of_vllm_is_refused() -> None:
    """A CPU run with vLLM's GPU build would fill card 0; the reverse fails without a reason."""
    other = {"cpu": "cuda", "cuda": "cpu"}[vllm_device()]
    with pytest.raises(ModelError, match=r"got vLLM's .* build, expected its"):
        VllmEngine(EngineConfig("policy", max_model_len=8, device=other))
