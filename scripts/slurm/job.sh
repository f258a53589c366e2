# shellcheck shell=bash
# Sourced by the recipes: the life of a job of Slurm, from its signals to its way back into the
# queue. Nothing here runs by itself. Values come from the environment; docs/slurm.md lists them.

: "${LOG_DIR:=runs/slurm}"    # a folder for each job's logs goes in here
: "${RAY_TMP:=/tmp}"          # on every node; a short path, since sockets go below it
: "${MAX_REQUEUES:=100}"      # how often a job goes back into the queue by itself
: "${MAX_IDLE_STARTS:=3}"     # so many starts in a row may bring no new checkpoint
: "${REQUEUE_ON:=75 4}"       # after which exit statuses: out of time, the retriever stayed away
: "${GRACE:=15}"              # s for the trainer to end when the job is over; below KillWait

main_pid=''   # the trainer
helpers=()    # pids of what it needs: retrievers, Ray
published=''  # a file that tells others of this job
first_step='' # the newest checkpoint when the job started
starting=1    # the main process does not run yet
cancelled=0   # Slurm ends the job
interrupted=0 # a signal came while we waited
OUTPUT_DIR=${OUTPUT_DIR:-}

note() { printf '%(%F %T)T slurm: %s\n' -1 "$*"; }

die() {
  note "$1" >&2
  exit "${2:-1}"
}

# One folder for the job's logs, and traps that take down whatever the job started.
begin_job() {
  [[ -n ${SLURM_JOB_ID:-} ]] || die "not in a job of Slurm: give this file to sbatch" 2
  job_dir=$(mkdir -p "$LOG_DIR" && cd "$LOG_DIR" && pwd)/$SLURM_JOB_ID
  ray_tmp=$RAY_TMP/sr1-$SLURM_JOB_ID
  mkdir -p "$job_dir" "$ray_tmp"
  ln -sfn "$(readlink /proc/$$/fd/1)" "$job_dir/job.log"
  export RAY_TMPDIR=$ray_tmp
  # Marks all that this start begins, so that it can be found when its parents are gone.
  export SEARCH_R1_JOB=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}.$$
  export SPT_NOENV=1 # vLLM gives its processes titles, which are else written over the mark
  # srun forgets the CPUs of a task unless told again.
  [[ -z ${SLURM_CPUS_PER_TASK:-} ]] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
  unset RAY_ADDRESS # of the shell that submitted
  trap on_warning USR1
  trap on_end TERM INT
  trap clean_up EXIT
  mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  note "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)), on ${nodes[*]}; logs: $job_dir"
}

# Slurm's warning (#SBATCH --signal): the trainer saves and ends with status 75.
on_warning() {
  interrupted=1
  ((!starting)) || die "time is nearly over and nothing has begun: give the job more --time"
  note "time is nearly over: asking for a checkpoint"
  kill -USR1 "$main_pid" 2>/dev/null || true
}

# scancel, or the time limit itself. Slurm signals the trainer too, which ends at once when it gets
# SIGTERM twice: what it is sent here only asks to save.
on_end() {
  interrupted=1 cancelled=1
  ((!starting)) || exit 143
  note "Slurm ends the job: $GRACE s for the trainer to end"
  kill -USR1 "$main_pid" 2>/dev/null || true
}

# run_main COMMAND...: to its end; returns its exit status, whatever signals come meanwhile.
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
  ((status != 128 + 10)) || status=75 # warned before it listened: nothing is lost
  return "$status"
}

# Ends what the job started, the trainer first; what hides is found by its mark.
clean_up() {
  local status=$?
  trap '' TERM INT USR1
  set +e
  disown -a # the shell need not report how each ended
  end_processes "$GRACE" "$main_pid"
  end_processes 5 "${helpers[@]}"
  ((status == 0)) || keep_ray_logs
  mapfile -t left < <(marked)
  if ((${#left[@]})); then
    note "ending ${#left[@]} processes that were left"
    kill -KILL "${left[@]}" 2>/dev/null
  fi
  rm -rf "$ray_tmp" "${published:-$ray_tmp}"
  if may_requeue "$status"; then requeue; fi
  note "job $SLURM_JOB_ID is over, exit status $status"
  exit "$status"
}

# end_processes SECONDS PID...: SIGTERM, and SIGKILL for those that are there after SECONDS.
end_processes() {
  local pid
  for pid in "${@:2}"; do [[ -z $pid ]] || kill -TERM "$pid" 2>/dev/null; done
  await_end "$@"
}

# await_end SECONDS PID...: until all are gone; SIGKILL for those that are there after SECONDS.
await_end() {
  local limit=$((SECONDS + $1)) pid
  for pid in "${@:2}"; do
    while [[ -n $pid ]] && kill -0 "$pid" 2>/dev/null; do
      ((SECONDS < limit)) || kill -KILL "$pid" 2>/dev/null || true
      sleep 0.2
    done
  done
}

# Pids on this node of all that this start of the job began, less this shell.
marked() {
  local files file pid
  files=$(grep -lzsx "SEARCH_R1_JOB=$SEARCH_R1_JOB" /proc/[0-9]*/environ)
  for file in $files; do
    pid=${file//[^0-9]/}
    [[ $pid == "$$" ]] || ! kill -0 "$pid" 2>/dev/null || echo "$pid"
  done
}

# What Ray wrote on this node, whether the trainer or we started it.
keep_ray_logs() {
  local logs
  for logs in "$ray_tmp"/{,ray/}session_latest/logs; do
    [[ ! -d $logs ]] || cp -r "$logs" "$job_dir/ray-${SLURM_RESTART_COUNT:-0}"
  done
}

# The newest checkpoint's step, or 0.
newest_step() {
  local folder step newest=0
  for folder in "$OUTPUT_DIR"/global_step_*; do
    step=${folder##*_}
    [[ ! $step =~ ^[0-9]+$ ]] || ((step <= newest)) || newest=$step
  done
  echo "$newest"
}

# may_requeue STATUS: whether the job should go back into the queue; says why not.
may_requeue() {
  local idle=0
  [[ " $REQUEUE_ON " == *" $1 "* ]] || return 1
  if ((cancelled)); then
    note "ended from outside: submit it again to go on"
    return 1
  fi
  if ((${SLURM_RESTART_COUNT:-0} >= MAX_REQUEUES)); then
    note "MAX_REQUEUES=$MAX_REQUEUES is used up: submit it again to go on"
    return 1
  fi
  if [[ -n $first_step ]] && (($(newest_step) <= first_step)); then
    idle=$(($(cat "$job_dir/idle_starts" 2>/dev/null || echo 0) + 1))
  fi
  echo "$idle" >"$job_dir/idle_starts"
  if ((idle >= MAX_IDLE_STARTS)); then
    note "$idle starts in a row brought no new checkpoint: a step needs more than the job's --time"
    return 1
  fi
}

requeue() {
  note "back into the queue${first_step:+; it goes on after step $(newest_step)}"
  scontrol requeue "$SLURM_JOB_ID" || note "scontrol requeue failed: submit it again to go on"
}

# choose_output OPTION...: the run's folder, the same at every start, used by one job at a time.
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
