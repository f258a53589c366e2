#!/usr/bin/env bash
# PPO as in the Search-R1 paper (arXiv 2503.09516): 8 GPUs, Qwen2.5-3B, Natural Questions.
#
#   bash train_ppo.sh                                      # the recipe
#   BASE_MODEL=meta-llama/Llama-3.2-3B N_GPUS=4 bash train_ppo.sh
#   bash train_ppo.sh max_turns=4 trainer.val_only=true    # any option; the last one wins
#   PRESET=1x80 bash train_ppo.sh                          # settings for a machine: docs/guides/models.md
#   bash train_ppo.sh --cfg job                            # print the options, start nothing
#
# Variables: see below and scripts/train_common.sh. A retriever must be running (retrieval_launch.sh).
set -euo pipefail
# shellcheck source=scripts/train_common.sh
source "$(dirname "${BASH_SOURCE[0]}")/scripts/train_common.sh"

train \
  "trainer.experiment_name=${EXPERIMENT_NAME:-search-r1-ppo-$(basename "$BASE_MODEL")}" \
  algorithm.adv_estimator=gae \
  "algorithm.gamma=${GAMMA:-1.0}" \
  "algorithm.lam=${LAM:-1.0}" \
  "algorithm.kl_ctrl.kl_coef=${KL_COEF:-0.001}" \
  "actor_rollout_ref.actor.use_kl_loss=${USE_KL_LOSS:-false}" \
  "actor_rollout_ref.actor.kl_loss_coef=${KL_COEF:-0.001}" \
  "actor_rollout_ref.rollout.n_agent=${N_AGENT:-1}" \
  "critic.model.path=${CRITIC_MODEL:-$BASE_MODEL}" \
  "critic.model.enable_gradient_checkpointing=${GRADIENT_CHECKPOINTING:-true}" \
  "critic.model.lora_rank=${CRITIC_LORA_RANK:-${LORA_RANK:-0}}" \
  "critic.model.lora_alpha=${LORA_ALPHA:-16}" \
  "critic.ppo_max_token_len_per_gpu=${CRITIC_MAX_TOKENS_PER_GPU:-${MAX_TOKENS_PER_GPU:-null}}" \
  ${CRITIC_MICRO_BATCH_SIZE:+"critic.ppo_micro_batch_size=$CRITIC_MICRO_BATCH_SIZE"} \
  "critic.model.fsdp_config.param_offload=$OFFLOAD" \
  "critic.model.fsdp_config.optimizer_offload=$OFFLOAD" \
  "critic.optim.lr=${CRITIC_LR:-1e-5}" \
  "critic.optim.lr_warmup_steps_ratio=${CRITIC_WARMUP:-0.015}" \
  "trainer.critic_warmup=${CRITIC_WARMUP_STEPS:-0}" \
  "$@"
