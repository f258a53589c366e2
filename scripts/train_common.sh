# shellcheck shell=bash
# Sourced by train_ppo.sh and train_grpo.sh: the options that both recipes of the paper share.
# Variables of the environment override the defaults. `train` starts the run.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

if [[ -z ${PYTHON:-} ]]; then
  PYTHON=python3
  [[ -x $root/.venv/bin/python ]] && PYTHON=$root/.venv/bin/python
fi

# PRESET=1x24 etc.: memory settings for a machine (docs/guides/models.md); variables already set win.
if [[ -n ${PRESET:-} ]]; then
  if [[ ! -f $root/scripts/presets/$PRESET.sh ]]; then
    known=("$root"/scripts/presets/*.sh)
    known=("${known[@]##*/}")
    echo "PRESET: got $PRESET, expected one of ${known[*]%.sh}" >&2
    exit 2
  fi
  # shellcheck source=/dev/null
  source "$root/scripts/presets/$PRESET.sh"
fi

: "${BASE_MODEL:=Qwen/Qwen2.5-3B}"
: "${DATA_DIR:=data/nq_search}"
: "${RETRIEVER_URL:=http://127.0.0.1:8000/retrieve}"
: "${PROJECT_NAME:=Search-R1}"
: "${OFFLOAD:=null}" # weights and optimizer on the host between uses; null: decided by an estimate

common_options() {
  cat <<OPTIONS
data.train_files=${TRAIN_FILES:-$DATA_DIR/train.parquet}
data.val_files=${VAL_FILES:-$DATA_DIR/test.parquet}
data.train_data_num=${TRAIN_DATA_NUM:-null}
data.val_data_num=${VAL_DATA_NUM:-null}
data.train_batch_size=${TRAIN_BATCH_SIZE:-512}
data.val_batch_size=${VAL_BATCH_SIZE:-256}
data.max_prompt_length=${MAX_PROMPT_LENGTH:-4096}
data.max_response_length=${MAX_RESPONSE_LENGTH:-500}
data.max_start_length=${MAX_START_LENGTH:-2048}
data.max_obs_length=${MAX_OBS_LENGTH:-500}
actor_rollout_ref.model.path=$BASE_MODEL
actor_rollout_ref.model.enable_gradient_checkpointing=${GRADIENT_CHECKPOINTING:-true}
actor_rollout_ref.model.lora_rank=${LORA_RANK:-0}
actor_rollout_ref.model.lora_alpha=${LORA_ALPHA:-16}
actor_rollout_ref.actor.optim.lr=${ACTOR_LR:-1e-6}
actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=${ACTOR_WARMUP:-0.285}
actor_rollout_ref.actor.ppo_mini_batch_size=${MINI_BATCH_SIZE:-256}
actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${MAX_TOKENS_PER_GPU:-null}
actor_rollout_ref.actor.state_masking=${STATE_MASKING:-true}
actor_rollout_ref.actor.fsdp_config.param_offload=$OFFLOAD
actor_rollout_ref.actor.fsdp_config.optimizer_offload=$OFFLOAD
actor_rollout_ref.ref.fsdp_config.param_offload=${REF_OFFLOAD:-$OFFLOAD}
actor_rollout_ref.rollout.temperature=${TEMPERATURE:-1.0}
actor_rollout_ref.rollout.gpu_memory_utilization=${GPU_MEMORY_UTILIZATION:-0.6}
actor_rollout_ref.rollout.tensor_model_parallel_size=${TENSOR_PARALLEL:-1}
trainer.project_name=$PROJECT_NAME
trainer.logger=${LOGGER:-[console,jsonl,wandb]}
trainer.n_gpus_per_node=${N_GPUS:-8}
trainer.rollout_gpus=${ROLLOUT_GPUS:-0}
trainer.nnodes=${N_NODES:-1}
trainer.save_freq=${SAVE_FREQ:-100}
trainer.test_freq=${TEST_FREQ:-50}
trainer.total_training_steps=${TOTAL_STEPS:-1005}
trainer.seed=${SEED:-0}
max_turns=${MAX_TURNS:-2}
retriever.url='$RETRIEVER_URL'
retriever.topk=${TOPK:-3}
OPTIONS
  # Without effect: it warns.
  [[ -z ${MICRO_BATCH_SIZE:-} ]] || echo "actor_rollout_ref.actor.ppo_micro_batch_size=$MICRO_BATCH_SIZE"
  [[ -z ${OUTPUT_DIR:-} ]] || echo "trainer.default_local_dir=$OUTPUT_DIR"
}

# chooses_engine OPTION...: whether an option names the engine, or recorded trajectories in its place.
chooses_engine() {
  local option
  for option in "$@"; do
    case ${option#"${option%%[^+]*}"} in
      actor_rollout_ref.rollout.name=* | actor_rollout_ref.rollout.url=* | data.rollouts=*) return 0 ;;
    esac
  done
  return 1
}

# tell_of_missing_data OPTION...: if DATA_DIR does not exist, and one of our commands builds a folder
# of its name, print the command; the program then reports the missing files.
tell_of_missing_data() {
  local option script
  script=scripts/data_process/$(basename "$DATA_DIR").py
  [[ -z ${TRAIN_FILES:-} && ! -e $DATA_DIR/train.parquet && -f $root/$script ]] || return 0
  for option in "$@"; do
    case ${option#"${option%%[^+]*}"} in data.train_files=* | data.rollouts=* | --*) return 0 ;; esac
  done
  echo "$DATA_DIR/train.parquet does not exist; this builds it: $PYTHON $script --local_dir $DATA_DIR" >&2
}

# train OPTION...: start training with the common options and OPTIONs; later values of a key win.
# The program checks model, data, retriever and devices before it starts.
train() {
  local missing
  # Where the packages are, it also names misspelt variables of the environment.
  if ! missing=$("$PYTHON" -c 'from importlib.util import find_spec
missing = [name for name in ("hydra", "ray", "torch", "vllm") if find_spec(name) is None]
print(*missing)
if not {*missing} - {"vllm"}:
    from search_r1.variables import warn_of_near_misses
    warn_of_near_misses()'); then
    echo "$PYTHON cannot be run: run 'make install', or set PYTHON" >&2
    return 2
  fi
  local common
  mapfile -t common < <(common_options)
  if [[ $missing == vllm ]]; then
    if ! chooses_engine "$@"; then
      echo "vLLM is not installed in $PYTHON: using actor_rollout_ref.rollout.name=transformers, for" \
        "small models only; 'make install' installs vLLM" >&2
      common+=(actor_rollout_ref.rollout.name=transformers)
    fi
  elif [[ -n $missing ]]; then
    echo "$PYTHON lacks the packages of training ($missing): run 'make install', or set PYTHON" >&2
    return 2
  fi
  tell_of_missing_data "$@"
  exec "$PYTHON" -m "${ENTRY:-verl.trainer.main_ppo}" "${common[@]}" "$@"
}
