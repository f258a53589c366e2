"""Which engines a policy with an adapter gets."""

from __future__ import annotations

from pathlib import Path

from tests.verl.rollout.engines import tiny_config
from verl.ext.lora.choice import problems, takes_adapters
from verl.rollout.interface import chosen, engine_class


def test_an_unmerged_adapter_needs_an_engine_that_takes_adapters(tmp_path: Path) -> None:
    """By default it is merged otherwise; `merge_adapter=False` is an error. vLLM takes adapters."""
    config = tiny_config(tmp_path, "transformers")
    config.actor_rollout_ref.model.lora_rank = 8
    config.trainer.device = "cuda"
    assert list(problems(config)) == [] and chosen(config).is_whole
    config.actor_rollout_ref.rollout.merge_adapter = False
    (problem,) = map(str, problems(config))
    assert "merge_adapter" in problem
    config.actor_rollout_ref.rollout.name = "vllm"
    assert list(problems(config)) == [] and not chosen(config).is_whole
    assert takes_adapters(chosen(config).engine) and not takes_adapters(engine_class("vllm"))
