#!/usr/bin/env bash
# Real questions, a real model: data, cold start, GRPO, evaluation; see README.md in this folder.
#
#   python scripts/data_process/small_hotpotqa.py      # builds the default DATA_DIR
#   bash example/smollm2/run.sh                        # BUDGET=short, on a GPU if there is one
#   BUDGET=full DATA_DIR=/data/qa bash example/smollm2/run.sh
#   bash example/smollm2/run.sh --stage evaluate       # only these of the stages below
#   bash example/smollm2/run.sh --set rl_steps=40 rl_lr=5e-5
#
# Variables: BUDGET (short, full), DEVICE (auto, cpu, cuda), DATA_DIR, OUT, SEED, PYTHON.
# The same command continues after an interruption; finished stages are skipped.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
if [[ -z ${PYTHON:-} ]]; then
  PYTHON=python3
  [[ -x $root/.venv/bin/python ]] && PYTHON=$root/.venv/bin/python
fi
export PYTHON

die() { echo "$1" >&2; exit 2; }

: "${BUDGET:=short}" "${DEVICE:=auto}" "${SEED:=0}"
if [[ $DEVICE == auto ]]; then
  DEVICE=cpu
  if nvidia-smi -L &>/dev/null; then DEVICE=cuda; fi
fi

# Every setting. Lengths are in tokens; a batch is of dialogues, rl_prompts x rl_group of them.
# topk: passages per search; max_turns: searches per dialogue; max_response_length: sampled tokens
# per turn; max_obs_length: three passages of Wikipedia; select_rows: training rows split off, by
# which checkpoints and settings are chosen; max_tokens: longest dialogue of the cold start;
# plain_share: share kept of those that neither compare nor search twice; sft_start: an adapter of
# rank sft_rank to train on, or none; sft_save_freq: steps between checkpoints of the cold start, from
# which it continues (0: none); sft_rank + rl_rank: an adapter above 12 MB is cut; rl_reward: a name in
# docs/guides/rewards.md; rl_options: options of GRPO after those of the stage rl, A=B;C=D;
# continued_steps, sampled_steps: updates of these stages; sampled_n: dialogues of a question;
# eval_rows: null for all 757.
declare -A s=(
  [template]=short [topk]=3 [max_turns]=2 [max_start_length]=192 [max_response_length]=112
  [max_obs_length]=560 [select_rows]=300 [max_tokens]=1648 [plain_share]=1 [sft_start]=none [sft_save_freq]=0 [sft_steps]=150 [sft_batch_size]=16 [sft_lr]=5e-4 [sft_rank]=12
  [rl_steps]=80 [rl_prompts]=6 [rl_group]=16 [rl_lr]=2e-4 [rl_rank]=18 [rl_reward]=em
  [rl_options]=none [continued_steps]=30 [sampled_steps]=30 [sampled_n]=4
  [rl_save_freq]=10 [rl_val_rows]=100 [eval_rows]=null [micro_batch_tokens]=2048
  [model]=models/SmolLM2-135M-Instruct
)
change() {
  local pair
  for pair; do
    [[ $pair == *=* && -n ${s[${pair%%=*}]+known} ]] \
      || die "--set: got $pair, expected KEY=VALUE of ${!s[*]}; fix: see $0"
    s[${pair%%=*}]=${pair#*=}
  done
}
case $BUDGET-$DEVICE in
  short-cpu) change sft_steps=48 sft_batch_size=8 rl_steps=15 rl_save_freq=5 rl_val_rows=40 \
    eval_rows=100 ;;
  full-cpu) change sft_steps=180 rl_save_freq=20 ;;
  short-cuda) change sft_steps=180 rl_steps=40 rl_prompts=16 rl_save_freq=20 eval_rows=300 \
    micro_batch_tokens=16384 ;;
  full-cuda) change sft_steps=270 rl_steps=300 rl_prompts=32 rl_save_freq=50 rl_val_rows=300 \
    micro_batch_tokens=16384 ;;
  *) die "got BUDGET=$BUDGET DEVICE=$DEVICE, expected short or full, cpu or cuda" ;;
esac

stages=()
data_dir=${DATA_DIR:-$root/data/small_hotpotqa} out=${OUT:-$root/runs/smollm2}
while (($#)); do
  case $1 in
    --stage) shift; while (($#)) && [[ $1 != --* ]]; do stages+=("$1"); shift; done ;;
    --set) shift; while (($#)) && [[ $1 != --* ]]; do change "$1"; shift; done ;;
    *) die "got $1, expected --stage NAME... or --set KEY=VALUE..." ;;
  esac
done
known=(data dialogues audit sft rl adapters evaluate continued sampled rates ship)
for name in "${stages[@]}"; do
  [[ " ${known[*]} " == *" $name "* ]] || die "--stage: got $name, expected one of ${known[*]}"
done
# Only by name: continued and sampled (other arms), rates (before rl), ship (changes the repository).
((${#stages[@]})) || stages=("${known[@]:0:7}")

# Settings that affected existing results cannot change: sft_* and so on once their folder exists.
for name in corpus train dev; do
  [[ -f $data_dir/$name.jsonl || -d $out/data ]] || die "data folder $data_dir: no $name.jsonl; \
fix: python scripts/data_process/small_hotpotqa.py, or name the folder that has it: DATA_DIR=..."
done
mkdir -p "$out/done" "$out/logs"
data_dir=$(cd "$data_dir" && pwd) out=$(cd "$out" && pwd)
s+=([budget]=$BUDGET [device]=$DEVICE [seed]=$SEED [data_dir]=$data_dir)
for key in "${!s[@]}"; do echo "$key=${s[$key]}"; done | sort >"$out/settings.new"
if [[ -f $out/settings ]]; then
  while IFS= read -r pair; do # a value may have spaces and brackets
    folder=$out/$(case $pair in sft_*) echo sft ;; rl_*) echo rl ;; \
      continued_*) echo continued ;; sampled_n=*) echo sampling ;; sampled_*) echo sampled ;; \
      eval_*) echo evaluation ;; esac)
    [[ ! -d $folder ]] || die "$out: got $pair, expected \
$(grep "^${pair%%=*}=" "$out/settings"), as it began; fix: the same settings, or another OUT"
  done < <(comm -23 "$out/settings.new" "$out/settings")
fi
mv "$out/settings.new" "$out/settings"

cd "$root"
base=${s[model]} dev=$out/data/dev.parquet
turn=$((s[max_response_length] + s[max_obs_length]))
max_prompt=$((s[max_start_length] + s[max_turns] * turn))
talk=(--template "${s[template]}" --max-turns "${s[max_turns]}" --topk "${s[topk]}")
lengths=(--max-start-length "${s[max_start_length]}" --max-prompt-length "$max_prompt" \
  --max-response-length "${s[max_response_length]}" --max-obs-length "${s[max_obs_length]}")
servers=()
trap '((${#servers[@]} == 0)) || kill "${servers[@]}" 2>/dev/null || true' EXIT

# serve KIND: starts a retrieval server over the corpus; sets `url`.
serve() {
  local file=$out/logs/$1.port
  rm -f "$file"
  RETRIEVER_NAME=$1 CORPUS_PATH=$out/data/corpus.jsonl TOPK=${s[topk]} PORT=0 \
    INDEX_PATH=$([[ $1 != bm25 ]] || echo "$out/index") \
    bash retrieval_launch.sh --port_file "$file" >"$out/logs/$1.log" 2>&1 &
  servers+=($!)
  until [[ -s $file ]]; do
    kill -0 "${servers[-1]}" 2>/dev/null || die "the retriever ended: see $out/logs/$1.log"
    sleep 0.5
  done
  url=http://127.0.0.1:$(<"$file")/retrieve
}

stage_data() {
  "$PYTHON" scripts/data_process/own_questions.py "$data_dir/train.jsonl" "$data_dir/dev.jsonl" \
    --local_dir "$out/data" --template_type "${s[template]}"
  "$PYTHON" -m example.smollm2.split --data "$out/data" --rows "${s[select_rows]}"
  cp "$data_dir/corpus.jsonl" "$out/data/corpus.jsonl"
  "$PYTHON" -m search_r1.search.index_builder --retrieval_method bm25 \
    --corpus_path "$out/data/corpus.jsonl" --save_dir "$out/index"
  [[ -f $base/config.json ]] || "$PYTHON" -m example.model --out "$base"
}

stage_dialogues() {
  serve bm25
  "$PYTHON" -m example.smollm2.dialogues --data "$out/data" --model "$base" --url "$url" \
    --seed "$SEED" --max-obs-length "${s[max_obs_length]}" --corpus "$out/data/corpus.jsonl" \
    --max-tokens "${s[max_tokens]}" --plain-share "${s[plain_share]}" "${talk[@]}"
}

# Where the evidence for each training question is: GRPO reads where the documents hold the answer.
stage_audit() {
  serve bm25
  "$PYTHON" -m search_r1.cli data audit "$out/data/train.parquet" --retriever-url "$url" \
    --corpus-path "$out/data/corpus.jsonl" --topk "${s[topk]}" --local-dir "$out/data/audited"
}

# imitate NAME STEPS SEED FILE OPTION...: supervised training on the dialogues of a file.
imitate() {
  "$PYTHON" -m verl.trainer.sft model_path="$base" train_file="$out/data/$4.jsonl" \
    output_dir="$out/$1" steps="$2" batch_size="${s[sft_batch_size]}" \
    lr="${s[sft_lr]}" schedule=cosine max_length=$((max_prompt + s[max_response_length])) \
    max_tokens_per_micro_batch="${s[micro_batch_tokens]}" lora_rank="${s[sft_rank]}" \
    device="$DEVICE" seed="$3" save_freq="${s[sft_save_freq]}" save_dtype=float32 "${@:5}"
}

# A start of the repository's has scale 1.
stage_sft() {
  local start=(lora_alpha=$((2 * s[sft_rank])))
  if [[ ${s[sft_start]} != none ]]; then
    start=(lora_alpha="${s[sft_rank]}" adapter_path="${s[sft_start]}")
  fi
  imitate sft "${s[sft_steps]}" "$SEED" dialogues "${start[@]}"
}

# further NAME STEPS FILE: more supervised training of the cold start's adapter, in another order.
further() {
  local alpha=$((2 * s[sft_rank]))
  [[ ${s[sft_start]} == none ]] || alpha=${s[sft_rank]}
  imitate "$1" "$2" $((SEED + 1)) "$3" lora_alpha="$alpha" adapter_path="$out/sft/adapter"
}

# Instead of GRPO: more of the cold start.
stage_continued() { further continued "${s[continued_steps]}" dialogues; }

# sample: the cold start reads the questions of GRPO, sampled_n times each. Sets `readable`.
sample() {
  readable=$out/data/readable.parquet
  serve bm25
  "$PYTHON" -c 'import sys; from pyarrow import parquet as p
p.write_table(p.read_table(sys.argv[1], filters=[("evidence", "=", "topk")]), sys.argv[2])' \
    "$out/data/audited/train.parquet" "$readable"
  "$PYTHON" -m search_r1.evaluate run --model "$out/sft" --data "$readable" --out "$out/sampling" \
    --agent example/smollm2/reading.py:reading --retriever-url "$url" --max-turns 0 \
    --template "${s[template]}" --topk "${s[topk]}" --n "${s[sampled_n]}" --temperature 1 \
    "${lengths[@]}" --seed "$SEED" --device "$DEVICE" --concurrency 64
}

# Instead of GRPO: rejection sampling, one right dialogue of each question is imitated.
# (evaluation/sampled is the evaluation of what comes out.)
stage_sampled() {
  sample
  "$PYTHON" -m search_r1.cli data demonstrations "$readable" --evaluations "$out/sampling" \
    --out "$out/data/sampled.jsonl" --seed "$SEED"
  further sampled "${s[sampled_steps]}" sampled
}

# Before GRPO: after it, the stage rl trains on the questions alone that are sometimes right.
stage_rates() {
  sample
  "$PYTHON" -m search_r1.cli data difficulty "$readable" --evaluations "$out/sampling" \
    --local-dir "$out/data/rated"
}

# Trains a second adapter on the merged first one, in reading alone: what paid
# (docs/evidence/smollm2.md). A group's documents are computed once, if the group fits a micro-batch;
# half of a step's groups make an update. The guard's limits that expect searches are off. If it stops
# the run (status 3), the last checkpoint that it trusts is used.
stage_rl() {
  rm -f "$out/done/adapters" "$out/done/evaluate" # of the cold start alone
  local batch=$((s[rl_prompts] * s[rl_group])) status=0 healthy options=() A=actor_rollout_ref
  local questions=$out/data/audited/train.parquet filter='{evidence:[topk]}'
  if [[ -f $out/done/rates ]]; then
    questions=$out/data/rated/readable.parquet filter='{pass_rate:{gt:0,lt:1}}'
  fi
  [[ ${s[rl_options]} == none ]] || IFS=';' read -ra options <<<"${s[rl_options]}"
  serve bm25
  BASE_MODEL=$out/sft RETRIEVER_URL=$url N_GPUS=1 TRAIN_FILES=$questions \
    VAL_FILES=$out/data/select.parquet VAL_DATA_NUM=${s[rl_val_rows]} TRAIN_BATCH_SIZE=${s[rl_prompts]} \
    MAX_START_LENGTH=${s[max_start_length]} MAX_PROMPT_LENGTH=$max_prompt \
    MAX_RESPONSE_LENGTH=${s[max_response_length]} MAX_OBS_LENGTH=${s[max_obs_length]} \
    MAX_TURNS=0 TOPK=${s[topk]} LORA_RANK=${s[rl_rank]} \
    LORA_ALPHA=$((2 * s[rl_rank])) GRADIENT_CHECKPOINTING=false ACTOR_LR=${s[rl_lr]} \
    ACTOR_WARMUP=0.05 MINI_BATCH_SIZE=$(((s[rl_prompts] + 1) / 2 * s[rl_group])) USE_KL_LOSS=false \
    MAX_TOKENS_PER_GPU=$((2 * s[micro_batch_tokens])) N_AGENT=${s[rl_group]} OUTPUT_DIR=$out/rl \
    EXPERIMENT_NAME=smollm2 LOGGER=[console,jsonl] TOTAL_STEPS=${s[rl_steps]} \
    SAVE_FREQ=${s[rl_save_freq]} TEST_FREQ=${s[rl_save_freq]} \
    bash train_grpo.sh template="${s[template]}" reward_model.name="${s[rl_reward]}" \
    algorithm.kl_ctrl.kl_coef=0 trainer.device="$DEVICE" trainer.resume_mode=auto \
    trainer.guard.action=stop $A.rollout.max_num_seqs=$((batch > 64 ? batch : 64)) \
    agent.name=example/smollm2/reading.py:reading "data.filter=$filter" \
    algorithm.adv_estimator=dr_grpo algorithm.filter_groups.enable=true \
    $A.actor.clip_ratio_high=0.28 $A.actor.old_log_probs=engine $A.rollout.temperature=0.7 \
    'trainer.guard.limits={search_share:null,drift_drop:null,drift_crash:null,shift_bound:null}' \
    "${options[@]}" \
    || status=$?
  ((status != 0)) || return 0
  ((status == 3)) || exit "$status"
  healthy=$(printf '%s\n' "$out"/rl/global_step_*/HEALTHY | sort -V | tail -n 1)
  [[ -f $healthy ]] || die "GRPO: got a collapse at once, expected a healthy checkpoint; fix: lower rl_lr"
  echo "GRPO collapsed: the recipe goes on with ${healthy%/*}"
  "$PYTHON" -m verl.checkpoint export "${healthy%/*}" --out "$out/rl/adapter" --adapter
}

# Without the stage rl, the later stages know the adapter sft alone.
stage_adapters() {
  "$PYTHON" -m example.smollm2.adapters --out "$out" --base "$base" "${talk[@]}" "${lengths[@]}"
}

# evaluate NAME URL METHOD [ADAPTER [DATA]]. The base never learned the tags, so its untagged replies count.
evaluate() {
  local start=${s[max_start_length]} response=${s[max_response_length]} more=(--untagged read)
  if [[ $3 != agent ]]; then start=$max_prompt response=256; fi # documents are in RAG's prompt
  [[ -z ${4:-} ]] || more=(--untagged wrong --adapter "$out/adapters/$4")
  [[ ${s[eval_rows]} == null ]] || more+=(--num-rows "${s[eval_rows]}")
  "$PYTHON" -m search_r1.evaluate run --model "$base" --data "${5:-$dev}" --out "$out/evaluation/$1" \
    --method "$3" --retriever-url "$2" "${talk[@]}" --max-start-length "$start" \
    --max-prompt-length "$max_prompt" --max-response-length "$response" \
    --max-obs-length "${s[max_obs_length]}" --seed "$SEED" --device "$DEVICE" \
    --concurrency "$([[ $DEVICE == cpu ]] && echo 64 || echo 256)" "${more[@]}"
}

stage_evaluate() {
  local bm25 random name pair best=sft names=(before sft) folders=() table=$out/table.md
  local pairs=(before:sft rag:sft)
  [[ ! -d $out/rl && ! -f $out/done/rl ]] || best=rl names+=(rl) pairs=(before:sft sft:rl before:rl rag:rl)
  for name in continued sampled; do
    [[ ! -d $out/adapters/$name ]] || names+=("$name") pairs+=("$name:$best")
  done
  serve bm25; bm25=$url
  serve random; random=$url
  for name in "${names[@]:1}"; do
    evaluate "select-$name" "$bm25" agent "$name" "$out/data/select.parquet"
  done
  evaluate before "$bm25" agent
  for name in "${names[@]:1}"; do evaluate "$name" "$bm25" agent "$name"; done
  evaluate "$best-empty" empty agent "$best"
  evaluate "$best-random" "$random" agent "$best"
  evaluate direct "$bm25" direct
  evaluate rag "$bm25" rag
  names+=("$best-empty" "$best-random" direct rag)
  for name in "${names[@]}"; do folders+=("$out/evaluation/$name"); done
  echo "# SmolLM2-135M-Instruct, budget $BUDGET, $DEVICE, seed $SEED" >"$table"
  for name in em f1 answer_in_documents searches; do
    printf '\n## %s\n\n' "$name"
    "$PYTHON" -m search_r1.evaluate table "${folders[@]}" --measure "$name"
  done >>"$table"
  for pair in "${pairs[@]}"; do
    for name in em f1; do
      printf '\n## %s against %s: %s\n\n' "${pair#*:}" "${pair%:*}" "$name"
      "$PYTHON" -m search_r1.evaluate compare "$out/evaluation/${pair#*:}" \
        "$out/evaluation/${pair%:*}" --measure "$name"
    done
  done >>"$table"
  echo "the figures are in $table"
}

stage_ship() { "$PYTHON" -m example.smollm2.ship --out "$out"; }

for name in "${stages[@]}"; do
  if [[ -f $out/done/$name ]]; then
    echo "$name: finished before, skipped"
    continue
  fi
  began=$SECONDS
  "stage_$name"
  ((${#servers[@]} == 0)) || kill "${servers[@]}" 2>/dev/null || true
  servers=()
  echo "$(((SECONDS - began) / 60)) minutes" >"$out/done/$name"
  echo "$name: done in $(<"$out/done/$name")"
done
