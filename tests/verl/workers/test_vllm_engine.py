"""What an engine is told; nothing here starts one."""

from dataclasses import replace

from verl.config import Config
from verl.workers.rollout.vllm_engine import EngineConfig


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
