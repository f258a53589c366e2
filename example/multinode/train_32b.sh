#!/usr/bin/env bash
# Qwen2.5-32B on 4 nodes of 8 x 80 GB.
#
#   RAY_ADDRESS=HEAD:6379 bash example/multinode/train_32b.sh              # GRPO
#   ALGO=ppo RAY_ADDRESS=HEAD:6379 bash example/multinode/train_32b.sh     # PPO, with a critic
#   bash example/multinode/train_32b.sh --cfg job                          # print the options, start nothing
#
# Variables: the ones below, and those of recipe.sh, train_grpo.sh and train_ppo.sh.
set -euo pipefail
: "${BASE_MODEL:=Qwen/Qwen2.5-32B}"
: "${N_NODES:=4}"
: "${TENSOR_PARALLEL:=4}" # GPUs per engine
: "${GPU_MEMORY_UTILIZATION:=0.45}"
# shellcheck source=example/multinode/recipe.sh
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
