#!/usr/bin/env bash
# A small budget on one card of 24 GB: reading, then searching; README.md in this folder.
#
#   bash example/recipes/one_card.sh                      # reading, Qwen2.5-0.5B-Instruct, LoRA
#   MODEL=Qwen/Qwen2.5-3B-Instruct WEIGHTS=full bash example/recipes/one_card.sh
#   PHASE=searching MODEL=runs/one_card/reading/model bash example/recipes/one_card.sh
#   bash example/recipes/one_card.sh --cfg job            # print the options, start nothing
#
# Variables: MODEL, WEIGHTS (lora, full), PHASE (reading, searching), OUT, and those of
# scripts/train_common.sh. A retriever must be running, and data/small_budget must be there.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
: "${MODEL:=Qwen/Qwen2.5-0.5B-Instruct}" "${WEIGHTS:=lora}" "${PHASE:=reading}"
: "${OUT:=runs/one_card}" "${TRAIN_FILES:=data/small_budget/train.parquet}"

case $WEIGHTS in
  lora) : "${LORA_RANK:=64}" "${LORA_ALPHA:=128}" "${ACTOR_LR:=1e-4}" ;;
  full) : "${ACTOR_LR:=1e-5}" ;;
  *) echo "WEIGHTS: got $WEIGHTS, expected lora or full" >&2; exit 2 ;;
esac
case $PHASE in
  # The question's own search comes before the first sampled token, so a group computes its documents
  # once; without a further search, only reading is learned.
  reading) phase=(agent.name=documents_first max_turns=0 "data.filter={evidence: [topk]}") ;;
  searching) phase=(max_turns=3 "data.filter={evidence: [topk, linked]}") ;;
  *) echo "PHASE: got $PHASE, expected reading or searching" >&2; exit 2 ;;
esac

export ACTOR_LR LORA_RANK="${LORA_RANK:-0}" LORA_ALPHA="${LORA_ALPHA:-16}" TRAIN_FILES
export BASE_MODEL=$MODEL OUTPUT_DIR=$OUT/$PHASE EXPERIMENT_NAME=one_card-$PHASE
export VAL_FILES="${VAL_FILES:-data/small_budget/select.parquet}" N_GPUS=1 N_AGENT=16 USE_KL_LOSS=false
export TRAIN_BATCH_SIZE="${TRAIN_BATCH_SIZE:-32}" MINI_BATCH_SIZE="${MINI_BATCH_SIZE:-512}"
export MAX_START_LENGTH=512 MAX_OBS_LENGTH=560 MAX_RESPONSE_LENGTH=256 MAX_PROMPT_LENGTH=3072
export TEMPERATURE="${TEMPERATURE:-1.0}" ACTOR_WARMUP=0.05 TOTAL_STEPS="${TOTAL_STEPS:-300}"
export MAX_TOKENS_PER_GPU="${MAX_TOKENS_PER_GPU:-16384}" GPU_MEMORY_UTILIZATION="${GPU_MEMORY_UTILIZATION:-0.5}"
export SAVE_FREQ="${SAVE_FREQ:-25}" TEST_FREQ="${TEST_FREQ:-25}" LOGGER="${LOGGER:-[console,jsonl]}"
exec bash "$root/train_grpo.sh" algorithm.adv_estimator=dr_grpo \
  actor_rollout_ref.actor.clip_ratio_high=0.28 algorithm.filter_groups.enable=true \
  "reward_model.weights={em: 1.0, f1: 0.2}" trainer.guard.action=stop "${phase[@]}" "$@"
