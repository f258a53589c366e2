# shellcheck shell=bash
# Eight GPUs of 80 GB and 1 TB of host memory: Qwen2.5-7B, all weights.
: "${N_GPUS:=8}"
: "${BASE_MODEL:=Qwen/Qwen2.5-7B}"
: "${MAX_TOKENS_PER_GPU:=16384}" # tokens of a micro-batch, a card
: "${GPU_MEMORY_UTILIZATION:=0.5}"
