# shellcheck shell=bash
# Sourced by train_7b.sh, train_32b.sh and train_72b.sh, which set the sizes. Starts a run on the Ray
# cluster at RAY_ADDRESS (head.sh, worker.sh) with the paper's hyper-parameters.
#
# ALGO           grpo (default) or ppo
# RETRIEVER_URL  one retriever for all nodes (http://HOST:8000/retrieve), or
#                http://127.0.0.1:8000/retrieve for a retriever on each node
# OUTPUT_DIR     folder on a file system that all nodes share; the same folder continues the same run
# and the variables of train_grpo.sh, train_ppo.sh and scripts/train_common.sh.

recipes=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=example/multinode/cluster.sh
source "$recipes/cluster.sh" # also tells the run whether Ray requires a token

# OFFLOAD is set here because the memory estimate needs a GPU, which the head may not have.
: "${ALGO:=grpo}" "${N_GPUS:=8}" "${OFFLOAD:=false}" "${SAVE_FREQ:=25}"
: "${EXPERIMENT_NAME:=multinode-$ALGO-$(basename "$BASE_MODEL")}"
: "${OUTPUT_DIR:=$PWD/runs/Search-R1/$EXPERIMENT_NAME}"
export ALGO N_GPUS OFFLOAD SAVE_FREQ EXPERIMENT_NAME OUTPUT_DIR
export BASE_MODEL N_NODES TENSOR_PARALLEL GPU_MEMORY_UTILIZATION

if [[ -z ${RAY_ADDRESS:-} && " $* " != *" --cfg "* ]]; then
  echo "RAY_ADDRESS is not set: export RAY_ADDRESS=HEAD:$RAY_PORT (docs/guides/clusters.md)" >&2
  exit 2
fi
exec bash "$recipes/../../train_$ALGO.sh" \
  trainer.resume_mode=auto \
  trainer.keep_last=2 \
  "trainer.node_timeout=${NODE_TIMEOUT:-1800}" \
  "$@"
