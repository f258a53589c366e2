# shellcheck shell=bash
# One GPU of 80 GB and 128 GB of host memory: Qwen2.5-7B with LoRA adapters of rank 64.
: "${N_GPUS:=1}"
: "${BASE_MODEL:=Qwen/Qwen2.5-7B}"
: "${LORA_RANK:=64}" "${LORA_ALPHA:=128}" "${ACTOR_LR:=1e-5}" "${CRITIC_LR:=1e-4}"
: "${MAX_TOKENS_PER_GPU:=16384}" # tokens of a micro-batch, a card
: "${GPU_MEMORY_UTILIZATION:=0.5}"
