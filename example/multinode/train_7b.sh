#!/usr/bin/env bash
# Qwen2.5-7B on 2 nodes of 8 x 80 GB.
#
#   RAY_ADDRESS=HEAD:6379 bash example/multinode/train_7b.sh              # GRPO
#   ALGO=ppo RAY_ADDRESS=HEAD:6379 bash example/multinode/train_7b.sh     # PPO, with a critic
#   bash example/multinode/train_7b.sh --cfg job                          # print the options, start nothing
#
# Variables: the ones below, and those of recipe.sh, train_grpo.sh and train_ppo.sh.
set -euo pipefail
: "${BASE_MODEL:=Qwen/Qwen2.5-7B}"
: "${N_NODES:=2}"
: "${TENSOR_PARALLEL:=1}" # GPUs per engine
: "${GPU_MEMORY_UTILIZATION:=0.6}"
# shellcheck source=example/multinode/recipe.sh
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
