#!/usr/bin/env bash
# Submits a recipe with the settings of a file (see example.conf).
#   bash scripts/slurm/submit.sh train my.conf [SBATCH OPTION...] [-- TRAINER OPTION...]
#   bash scripts/slurm/submit.sh retriever my.conf [SBATCH OPTION...]  # ignores NODES and GPUS
#   DRY_RUN=1 bash scripts/slurm/submit.sh train my.conf           # only print the command
set -euo pipefail
if (($# < 2)) || [[ $1 != train && $1 != retriever ]]; then
  echo "usage: bash scripts/slurm/submit.sh train|retriever CONF [SBATCH OPTION...] [-- OPTION...]" >&2
  exit 2
fi
recipe=$1 conf=$2
shift 2
[[ -f $conf ]] || { echo "$conf: no such file; copy scripts/slurm/example.conf" >&2; exit 2; }
[[ -n ${DRY_RUN:-} ]] || command -v sbatch >/dev/null || {
  echo "no sbatch here: run this on a login node, or DRY_RUN=1 to see the command" >&2; exit 2; }

set -a # export the settings to the job
# shellcheck source=scripts/slurm/example.conf
source "$conf"
set +a
SEARCH_R1=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export SEARCH_R1

options=(--job-name="${EXPERIMENT_NAME:-search-r1}-$recipe" --export=ALL)
add() { [[ -z $2 ]] || options+=("$1=$2"); }
add --partition "${PARTITION:-}"
add --account "${ACCOUNT:-}"
add --qos "${QOS:-}"
add --time "${TIME:-}"
add --cpus-per-task "${CPUS:-}"
add --mem "${MEM:-}"
if [[ $recipe == train ]]; then
  add --nodes "${NODES:-}"
  add --gpus-per-node "${GPUS:-}"
  add --signal "${WARNING:+B:USR1@$WARNING}"
fi
# shellcheck disable=SC2206 # a list of options
options+=(${SBATCH_ARGS:-})
while (($#)) && [[ $1 != -- ]]; do
  options+=("$1")
  shift
done
if (($#)); then shift; fi

cd "$SEARCH_R1"
# Before a job waits in the queue for hours: what its settings name as files must be there. What only
# the job's nodes see is not checked with CHECK_FILES="".
need() { # VARIABLE FIX: the path in VARIABLE exists; a hub name is no path.
  local value=${!1:-}
  if [[ -n $value && ! -e $value ]]; then
    echo "$1: got $value, expected an existing path; fix: $2, or CHECK_FILES= if only the nodes see it" >&2
    missing=1
  fi
}
missing=
if [[ -n ${CHECK_FILES-yes} ]]; then
  if [[ $recipe == train ]]; then
    model=${BASE_MODEL:-} # a hub's name is OWNER/NAME, of which OWNER is no folder here
    if [[ $model == [./~]* || $model == */*/* || ($model == */* && -d ${model%%/*}) ]]; then
      need BASE_MODEL "the model's folder"
    fi
    need DATA_DIR "python scripts/data_process/nq_search.py --local_dir ${DATA_DIR:-}"
  fi
  if [[ $recipe == retriever || -z ${RETRIEVER_URL:-}${RETRIEVER_FILE:-} ]]; then
    need CORPUS_PATH "python -m scripts.download corpus --save_dir FOLDER"
    need INDEX_PATH "python -m scripts.download e5 --save_dir FOLDER, or bash search_r1/search/build_index.sh"
  fi
fi
[[ -z $missing ]] || exit 2
command=(sbatch "${options[@]}" "scripts/slurm/$recipe.sbatch" "$@")
printf '%q ' "${command[@]}"
echo
[[ -n ${DRY_RUN:-} ]] || "${command[@]}"
