# shellcheck shell=bash
# Sourced by the recipes: the lifecycle of a Slurm job, from signals to requeueing. It only defines
# functions. Variables of the environment override the defaults; docs/guides/clusters.md lists them.

: "${LOG_DIR:=runs/slurm}"    # parent of each job's log folder
: "${RAY_TMP:=/tmp}"          # on every node; short, since it holds Unix sockets
: "${MAX_REQUEUES:=100}"      # maximum number of automatic requeues
: "${MAX_IDLE_STARTS:=3}"     # maximum starts in a row without a new checkpoint
: "${REQUEUE_ON:=75 4}"       # on these exit statuses: out of time, retriever unavailable
: "${GRACE:=15}"              # seconds for the trainer to end after the job; below KillWait

main_pid=''   # the trainer
helpers=()    # pids of the retrievers and Ray nodes that it needs
published=''  # file with this job's address for other jobs
first_step='' # step of the newest checkpoint at the start
starting=1    # whether the main process has not started yet
cancelled=0   # whether Slurm is ending the job
interrupted=0 # whether a signal interrupted a wait
OUTPUT_DIR=${OUTPUT_DIR:-}

note() { printf '%(%F %T)T slurm: %s\n' -1 "$*"; }

die() {
  note "$1" >&2
  exit "${2:-1}"
}

# Create the job's log folder and set traps that stop everything the job started.
begin_job() {
  [[ -n ${SLURM_JOB_ID:-} ]] || die "not in a Slurm job: submit this file with sbatch" 2
  job_dir=$(mkdir -p "$LOG_DIR" && cd "$LOG_DIR" && pwd)/$SLURM_JOB_ID
  ray_tmp=$RAY_TMP/sr1-$SLURM_JOB_ID
  mkdir -p "$job_dir" "$ray_tmp"
  ln -sfn "$(readlink /proc/$$/fd/1)" "$job_dir/job.log"
  export RAY_TMPDIR=$ray_tmp
  # Marks all processes of this start, so that orphans can be found.
  export SEARCH_R1_JOB=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}.$$
  export SPT_NOENV=1 # else the process titles of vLLM overwrite the mark
  # srun does not inherit the number of CPUs per task from sbatch.
  [[ -z ${SLURM_CPUS_PER_TASK:-} ]] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
  unset RAY_ADDRESS # inherited from the submitting shell
  trap on_warning USR1
  trap on_end TERM INT
  trap clean_up EXIT
  mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  note "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)), on ${nodes[*]}; logs: $job_dir"
}

# Handle Slurm's warning (#SBATCH --signal): the trainer saves and ends with status 75.
on_warning() {
  interrupted=1
  ((!starting)) || die "time is nearly over before training has started: give the job more --time"
  note "time is nearly over: asking for a checkpoint"
  kill -USR1 "$main_pid" 2>/dev/null || true
}

# Handle scancel or the time limit. Slurm sends SIGTERM to the trainer too, which would end at once
# on a second one; SIGUSR1 only asks it to save.
on_end() {
  interrupted=1 cancelled=1
  ((!starting)) || exit 143
  note "Slurm ends the job: $GRACE s for the trainer to end"
  kill -USR1 "$main_pid" 2>/dev/null || true
}

# run_main COMMAND...: run it to its end, through signals; returns its exit status.
run_main() {
  local status
  "$@" &
  main_pid=$! starting=0
  while true; do
    interrupted=0 status=0
    wait "$main_pid" || status=$?
    ((interrupted)) || break
    ((!cancelled)) || await_end "$GRACE" "$main_pid"
  done
  ((status != 128 + 10)) || status=75 # SIGUSR1 before it had a handler: nothing is lost
  return "$status"
}

# Stop everything the job started, the trainer first; orphans are found by their mark.
clean_up() {
  local status=$?
  trap '' TERM INT USR1
  set +e
  disown -a # no messages of the shell about ended processes
  end_processes "$GRACE" "$main_pid"
  end_processes 5 "${helpers[@]}"
  ((status == 0)) || keep_ray_logs
  mapfile -t left < <(marked)
  if ((${#left[@]})); then
    note "killing ${#left[@]} processes that were left"
    kill -KILL "${left[@]}" 2>/dev/null
  fi
  rm -rf "$ray_tmp" "${published:-$ray_tmp}"
  if may_requeue "$status"; then requeue; fi
  note "job $SLURM_JOB_ID is over, exit status $status"
  exit "$status"
}

# end_processes SECONDS PID...: send SIGTERM, and SIGKILL after SECONDS.
end_processes() {
  local pid
  for pid in "${@:2}"; do [[ -z $pid ]] || kill -TERM "$pid" 2>/dev/null; done
  await_end "$@"
}

# await_end SECONDS PID...: wait until all have ended; send SIGKILL after SECONDS.
await_end() {
  local limit=$((SECONDS + $1)) pid
  for pid in "${@:2}"; do
    while [[ -n $pid ]] && kill -0 "$pid" 2>/dev/null; do
      ((SECONDS < limit)) || kill -KILL "$pid" 2>/dev/null || true
      sleep 0.2
    done
  done
}

# Print the pids of all processes of this start on this node, except this shell.
marked() {
  local files file pid
  files=$(grep -lzsx "SEARCH_R1_JOB=$SEARCH_R1_JOB" /proc/[0-9]*/environ)
  for file in $files; do
    pid=${file//[^0-9]/}
    [[ $pid == "$$" ]] || ! kill -0 "$pid" 2>/dev/null || echo "$pid"
  done
}

# Copy Ray's logs on this node, whether the trainer or this job started it.
keep_ray_logs() {
  local logs
  for logs in "$ray_tmp"/{,ray/}session_latest/logs; do
    [[ ! -d $logs ]] || cp -r "$logs" "$job_dir/ray-${SLURM_RESTART_COUNT:-0}"
  done
}

# Print the step of the newest checkpoint, or 0.
newest_step() {
  local folder step newest=0
  for folder in "$OUTPUT_DIR"/global_step_*; do
    step=${folder##*_}
    [[ ! $step =~ ^[0-9]+$ ]] || ((step <= newest)) || newest=$step
  done
  echo "$newest"
}

# may_requeue STATUS: whether to requeue the job; notes why not.
may_requeue() {
  local idle=0
  [[ " $REQUEUE_ON " == *" $1 "* ]] || return 1
  if ((cancelled)); then
    note "cancelled: submit it again to continue"
    return 1
  fi
  if ((${SLURM_RESTART_COUNT:-0} >= MAX_REQUEUES)); then
    note "MAX_REQUEUES=$MAX_REQUEUES is used up: submit it again to continue"
    return 1
  fi
  if [[ -n $first_step ]] && (($(newest_step) <= first_step)); then
    idle=$(($(cat "$job_dir/idle_starts" 2>/dev/null || echo 0) + 1))
  fi
  echo "$idle" >"$job_dir/idle_starts"
  if ((idle >= MAX_IDLE_STARTS)); then
    note "$idle starts in a row without a new checkpoint: a step needs more than the job's --time"
    return 1
  fi
}

requeue() {
  note "requeued${first_step:+; it continues after step $(newest_step)}"
  scontrol requeue "$SLURM_JOB_ID" || note "scontrol requeue failed: submit it again to continue"
}

# choose_output OPTION...: set OUTPUT_DIR, the same at every start, for one job at a time.
choose_output() {
  local option owner
  for option; do
    [[ $option != trainer.default_local_dir=* ]] || OUTPUT_DIR=${option#*=}
  done
  mkdir -p "$OUTPUT_DIR"
  owner=$(cat "$OUTPUT_DIR/slurm_job" 2>/dev/null || true)
  if [[ -n $owner && $owner != "$SLURM_JOB_ID" ]] \
    && squeue --noheader --jobs="$owner" --states=RUNNING,COMPLETING 2>/dev/null | grep -q .; then
    die "job $owner writes into $OUTPUT_DIR: scancel $owner, or set another EXPERIMENT_NAME" 2
  fi
  echo "$SLURM_JOB_ID" >"$OUTPUT_DIR/slurm_job"
  first_step=$(newest_step)
  export OUTPUT_DIR
}
