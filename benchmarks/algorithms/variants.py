"""The compared variants: options by name, and the budget that all of them share."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

NUM_TRAJECTORIES = 64
"""Trajectories of one training step, with every algorithm."""
GROUP_SIZE = 8
NUM_STEPS = 24
TEST_FREQ = 2
"""Steps between validations, and so the resolution of the steps to a threshold."""
POLICY_LR = 5e-6
CRITIC_LR = 1e-4
LORA_LR = 5e-5

COMMON = (
    "trainer.device=cpu",
    "trainer.n_gpus_per_node=1",
    "trainer.logger=[jsonl]",
    "trainer.save_freq=0",
    f"trainer.test_freq={TEST_FREQ}",
    f"trainer.total_training_steps={NUM_STEPS}",
    "trainer.compute_dtype=float32",
    "template=short",
    "max_turns=3",
    "retriever.topk=1",
    "data.max_start_length=96",
    "data.max_prompt_length=320",
    "data.max_response_length=48",
    "data.max_obs_length=96",
    "data.val_batch_size=128",
    "actor_rollout_ref.model.enable_gradient_checkpointing=false",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192",
    f"actor_rollout_ref.actor.optim.lr={POLICY_LR}",
    "actor_rollout_ref.actor.use_kl_loss=false",
    "actor_rollout_ref.rollout.max_num_seqs=128",
    "actor_rollout_ref.rollout.cpu_kv_cache_gib=1",
    "algorithm.kl_ctrl.kl_coef=0",
)
"""Settings of the tiny policy on the example: 4 optimizer steps per step, no KL penalty."""

GROUPED = (
    f"data.train_batch_size={NUM_TRAJECTORIES // GROUP_SIZE}",
    f"actor_rollout_ref.rollout.n_agent={GROUP_SIZE}",
)
UNGROUPED = (f"data.train_batch_size={NUM_TRAJECTORIES}", "actor_rollout_ref.rollout.n_agent=1")

GRPO = ("algorithm.adv_estimator=grpo", *GROUPED)
PPO = (
    "algorithm.adv_estimator=gae",
    *UNGROUPED,
    f"critic.optim.lr={CRITIC_LR}",
    "critic.model.enable_gradient_checkpointing=false",
)
NO_MASK = "actor_rollout_ref.actor.state_masking=false"

VARIANTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "ppo": PPO,
        "grpo": GRPO,
        "dr_grpo": (
            "algorithm.adv_estimator=dr_grpo",
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm",
            *GROUPED,
        ),
        "rloo": ("algorithm.adv_estimator=rloo", *GROUPED),
        "reinforce_plus_plus": ("algorithm.adv_estimator=reinforce_plus_plus", *UNGROUPED),
        "gspo": (
            *GRPO,
            "actor_rollout_ref.actor.policy_loss=gspo",
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
            "actor_rollout_ref.actor.clip_ratio=3e-4",
            "actor_rollout_ref.actor.clip_ratio_high=4e-4",
        ),
        "cispo": (*GRPO, "actor_rollout_ref.actor.policy_loss=cispo"),
        "grpo_llds": (*GRPO, "actor_rollout_ref.actor.terms.llds=0.1"),
        "grpo_no_mask": (*GRPO, NO_MASK),
        "ppo_no_mask": (*PPO, NO_MASK),
        "grpo_lora": (
            *GRPO,
            "actor_rollout_ref.model.lora_rank=16",
            "actor_rollout_ref.model.lora_alpha=32",
            f"actor_rollout_ref.actor.optim.lr={LORA_LR}",
        ),
    }
)
"""Options by variant, on top of `COMMON`."""
