#!/usr/bin/env bash
# Qwen2.5-72B on 8 nodes of 8 x 80 GB.
#
#   RAY_ADDRESS=HEAD:6379 bash example/multinode/train_72b.sh              # GRPO
#   ALGO=ppo RAY_ADDRESS=HEAD:6379 bash example/multinode/train_72b.sh     # PPO, with a critic
#   bash example/multinode/train_72b.sh --cfg job                          # print the options, start nothing
#
# Variables: the ones below, and those of recipe.sh, train_grpo.sh and train_ppo.sh.
set -euo pipefail
: "${BASE_MODEL:=Qwen/Qwen2.5-72B}"
: "${N_NODES:=8}"
: "${TENSOR_PARALLEL:=8}" # GPUs per engine
: "${GPU_MEMORY_UTILIZATION:=0.4}"
# shellcheck source=example/multinode/recipe.sh
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
