# shellcheck shell=bash
# Two GPUs of 80 GB and 256 GB of host memory: Qwen2.5-3B, all weights.
: "${N_GPUS:=2}"
: "${BASE_MODEL:=Qwen/Qwen2.5-3B}"
: "${MAX_TOKENS_PER_GPU:=16384}" # tokens of a micro-batch, a card
: "${GPU_MEMORY_UTILIZATION:=0.4}"
