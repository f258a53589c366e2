# shellcheck shell=bash
# shellcheck disable=SC2154 # begin_job sets job_dir, ray_tmp and nodes
# Sourced by the recipes after job.sh: Python, nodes, retriever and Ray of a Slurm job.

: "${RETRIEVER_NODES:=first}" # first or all: nodes of the job with a retriever
: "${RETRIEVER_OPEN:=}"       # not empty: other jobs may use it too (always on several nodes)
: "${RETRIEVER_PYTHON:=}"      # another interpreter for the retriever, e.g. with faiss-gpu
: "${TRAINER_MEM:=8}"         # GiB that the trainer needs on the first node
: "${RETRIEVER_WAIT:=1800}"   # seconds until the retriever must be healthy
: "${RAY_WAIT:=300}"          # seconds until all nodes must have joined Ray

SLURM_DIR=$PWD/scripts/slurm

# Load MODULES ("cuda/12.4 python/3.11"), then CONDA_ENV or VENV, then run SETUP (any command).
load_environment() {
  set +eu # scripts that are not ours may fail or use unset variables
  if [[ -n ${MODULES:-} ]]; then
    load_modules
  fi
  if [[ -n ${CONDA_ENV:-} ]]; then
    eval "$("${CONDA_EXE:-conda}" shell.bash hook)"
    conda activate "$CONDA_ENV" || die "conda activate $CONDA_ENV failed" 2
  elif [[ -n ${VENV:-} ]]; then
    # shellcheck disable=SC1091
    source "$VENV/bin/activate" || die "VENV=$VENV is not a virtual environment" 2
  fi
  [[ -z ${SETUP:-} ]] || eval "$SETUP" || die "SETUP failed: $SETUP" 2
  set -eu
  if [[ -z ${PYTHON:-} && -z ${CONDA_ENV:-}${VENV:-} && -x .venv/bin/python ]]; then
    PYTHON=$PWD/.venv/bin/python
  fi
  [[ -n ${PYTHON:-} ]] || PYTHON=$(command -v python3) \
    || die "no python3 here: set VENV, CONDA_ENV, MODULES or PYTHON" 2
  export PYTHON PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
}

load_modules() {
  local file
  for file in /etc/profile.d/{modules,lmod,z00_lmod}.sh; do
    # shellcheck disable=SC1090
    type module &>/dev/null || [[ ! -f $file ]] || source "$file"
  done
  type module &>/dev/null || die "MODULES=$MODULES, but this node has no module command" 2
  # shellcheck disable=SC2086 # a list
  module load $MODULES || die "module load $MODULES failed" 2
}

# Export the end of the job's time limit (Unix time) for the trainer; older Slurms do not set it.
export_end_time() {
  local end
  unset SLURM_JOB_END_TIME # may be inherited from a job that submitted this one
  end=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e)
  if [[ $end == 20* ]]; then
    SLURM_JOB_END_TIME=$(date --date="$end" +%s)
    export SLURM_JOB_END_TIME
  fi
}

# address_of NODE: print its IPv4 address according to Slurm.
address_of() {
  local name
  name=$(scontrol show node "$1" --oneliner | grep -o ' NodeAddr=[^ ]*')
  getent ahostsv4 "${name#*=}" | awk '{print $1; exit}'
}

# on_node NODE COMMAND...: replace this shell by COMMAND, through srun on nodes but the first.
on_node() {
  local node=$1
  shift
  [[ $node != "${nodes[0]}" ]] || exec "$@"
  exec srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" --cpu-bind=none --mpi=none "$@"
}

# wait_for SECONDS NAME LOG PID COMMAND...: wait until COMMAND succeeds, while PID (if any) runs.
wait_for() {
  local seconds=$1 name=$2 log=$3 pid=$4 began=$SECONDS noted=$SECONDS why=''
  shift 4
  until "$@"; do
    if [[ -n $pid ]] && ! kill -0 "$pid" 2>/dev/null; then why="its process ended"; fi
    ((SECONDS - began < seconds)) || why="not ready after $seconds s"
    if [[ -n $why ]]; then
      [[ ! -s $log ]] || sed 's/^/  | /' < <(tail -n 15 "$log") >&2
      die "$name: $why${log:+; the end of $log is above}"
    fi
    if ((SECONDS - noted >= 60)); then
      noted=$SECONDS
      note "waiting for $name: $((SECONDS - began)) of $seconds s"
    fi
    sleep 1
  done
}

# is_healthy URL: whether a server answers; one without /health is checked by the trainer instead.
is_healthy() {
  "$PYTHON" - "${1%/*}/health" <<'PYTHON'
import sys, urllib.error, urllib.request
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
try:
    opener.open(sys.argv[1], timeout=10).close()
except urllib.error.HTTPError as error:
    sys.exit(error.code not in (404, 405, 501))
except (OSError, ValueError):
    sys.exit(1)
PYTHON
}

# start_retrievers NODE...: start a server on each; set RETRIEVER_URL when all are healthy.
start_retrievers() {
  local node file log pid urls=()
  local -A pids=()
  for node; do
    file=$job_dir/retriever-$node
    rm -f "$file.port"
    on_node "$node" bash "$SLURM_DIR/keep_retriever.sh" "$(bind_address "$node")" "$file" \
      >>"$file.log" 2>&1 &
    pids[$node]=$!
    helpers+=($!)
  done
  for node; do
    file=$job_dir/retriever-$node log=$job_dir/retriever-$node.log pid=${pids[$node]}
    wait_for "$RETRIEVER_WAIT" "the retriever on $node" "$log" "$pid" test -s "$file.port"
    urls+=("http://$(bind_address "$node"):$(<"$file.port")/retrieve")
  done
  RETRIEVER_URL=$(IFS=,; echo "${urls[*]}")
  wait_healthy
  [[ -z ${pids[${nodes[0]}]:-} ]] || check_memory "${pids[${nodes[0]}]}"
}

# check_memory PID: trainer and retriever share the memory of the job's first node. The retriever's
# private memory cannot be reclaimed; pages of a mapped index can, but are then read from disk again
# at each search. Ends the job now rather than when it runs out of memory after days.
check_memory() {
  local status=0
  "$PYTHON" scripts/slurm/memory.py "$1" "$TRAINER_MEM" || status=$?
  ((status == 0)) || die "the job would run out of memory, see above" 2
}

# bind_address NODE: print the address to listen on: loopback, unless other nodes or jobs connect.
bind_address() {
  if [[ -n $RETRIEVER_OPEN ]] || ((${#nodes[@]} > 1)); then address_of "$1"; else echo 127.0.0.1; fi
}

# find_retriever: use the retriever whose job (retriever.sbatch) wrote RETRIEVER_FILE.
find_retriever() {
  wait_for "$RETRIEVER_WAIT" "the address of a retriever in $RETRIEVER_FILE" "" "" \
    test -s "$RETRIEVER_FILE"
  RETRIEVER_URL=$(<"$RETRIEVER_FILE")
  wait_healthy
}

# Wait until all servers in RETRIEVER_URL answer.
wait_healthy() {
  local url
  export RETRIEVER_URL
  for url in ${RETRIEVER_URL//,/ }; do
    [[ $url == empty ]] || wait_for "$RETRIEVER_WAIT" "${url%/*}/health" "" "" is_healthy "$url"
  done
  note "retriever: $RETRIEVER_URL"
}

# free_port FIRST: print the first free port on this machine from FIRST on.
free_port() {
  "$PYTHON" - "$1" <<'PYTHON'
import contextlib, socket, sys
for port in range(int(sys.argv[1]), 65536):
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind(("", port))
        print(port)
        break
PYTHON
}

# start_ray: start a cluster over all nodes of the job, head on the first; set RAY_ADDRESS.
start_ray() {
  local node port client
  # Two jobs may share a node, so each uses another range; Ray finds its other ports itself.
  port=$(free_port $((20000 + SLURM_JOB_ID % 5000 * 2)))
  client=$(free_port $((port + 1)))
  RAY_ADDRESS=$(address_of "${nodes[0]}"):$port
  # Anyone who can reach a Ray cluster may run code in it, and other users share the network.
  RAY_AUTH_TOKEN=$("$PYTHON" -c 'import secrets; print(secrets.token_hex(32))')
  export RAY_ADDRESS RAY_AUTH_TOKEN RAY_AUTH_MODE=token
  # Even with usage reports off, Ray reports that they are off; nothing listens at this address.
  export RAY_USAGE_STATS_REPORT_URL=http://127.0.0.1:9/
  start_ray_node "${nodes[0]}" --head --port="$port" --ray-client-server-port="$client" \
    --include-dashboard=false --disable-usage-stats --temp-dir="$ray_tmp"
  has_nodes 1 "${nodes[0]}"
  for node in "${nodes[@]:1}"; do
    start_ray_node "$node" --address="$RAY_ADDRESS"
  done
  has_nodes "${#nodes[@]}" "${nodes[-1]}"
  note "Ray: ${#nodes[@]} nodes at $RAY_ADDRESS"
}

# start_ray_node NODE OPTION...: start a Ray node; its pid is appended to `helpers`.
start_ray_node() {
  local node=$1 num_cpus=${SLURM_CPUS_ON_NODE:-1}
  ((num_cpus >= ${N_GPUS:-1})) || num_cpus=$N_GPUS # each rank requests a CPU
  on_node "$node" bash "$SLURM_DIR/ray_node.sh" "$ray_tmp" --num-cpus="$num_cpus" \
    --node-ip-address="$(address_of "$node")" "${@:2}" >>"$job_dir/ray-$node.log" 2>&1 &
  helpers+=($!)
}

# has_nodes NUM NODE: wait until the cluster has NUM nodes; NODE was started last.
has_nodes() {
  wait_for "$RAY_WAIT" "$1 of ${#nodes[@]} nodes in Ray" "$job_dir/ray-$2.log" "${helpers[-1]}" \
    joined "$1"
}

# joined NUM: whether the cluster at RAY_ADDRESS has NUM live nodes.
joined() {
  "$PYTHON" - "$1" 2>>"$job_dir/ray-joined.log" <<'PYTHON'
import sys
import ray
ray.init(log_to_driver=False, logging_level="error")
sys.exit(sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[1]))
PYTHON
}
