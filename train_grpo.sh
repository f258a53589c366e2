#!/usr/bin/env bash
# GRPO as in the Search-R1 paper (arXiv 2503.09516): 8 GPUs, Qwen2.5-3B, Natural Questions.
#
#   bash train_grpo.sh                                     # the recipe
#   BASE_MODEL=meta-llama/Llama-3.2-3B N_GPUS=4 bash train_grpo.sh
#   bash train_grpo.sh max_turns=4 trainer.val_only=true   # any option; the last one wins
#   PRESET=1x80 bash train_grpo.sh                         # settings for a machine: docs/guides/models.md
#   bash train_grpo.sh --cfg job                           # print the options, start nothing
#
# Variables: see below and scripts/train_common.sh. A retriever must be running (retrieval_launch.sh).
set -euo pipefail
# shellcheck source=scripts/train_common.sh
source "$(dirname "${BASH_SOURCE[0]}")/scripts/train_common.sh"

# KL is in the loss; with USE_KL_LOSS=false there is none, or with KL_COEF in the reward.
in_reward=()
[[ ${USE_KL_LOSS:-true} != [Ff]alse ]] || in_reward=("algorithm.kl_ctrl.kl_coef=${KL_COEF:-0}")

train \
  "trainer.experiment_name=${EXPERIMENT_NAME:-search-r1-grpo-$(basename "$BASE_MODEL")}" \
  algorithm.adv_estimator=grpo \
  "actor_rollout_ref.rollout.n_agent=${N_AGENT:-5}" \
  "actor_rollout_ref.actor.use_kl_loss=${USE_KL_LOSS:-true}" \
  "actor_rollout_ref.actor.kl_loss_coef=${KL_COEF:-0.001}" \
  actor_rollout_ref.actor.kl_loss_type=low_var_kl \
  "${in_reward[@]}" \
  "$@"
