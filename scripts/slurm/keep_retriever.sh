#!/usr/bin/env bash
# Runs the retriever of a Slurm job; restarts it on the same port when it dies.
#   keep_retriever.sh ADDRESS FILE >>FILE.log      # writes the port to FILE.port once it is healthy
set -euo pipefail
address=$1 file=$2
server=''
trap 'trap "" TERM; [[ -z $server ]] || kill "$server" 2>/dev/null; wait; exit 0' TERM INT

export PYTHON=${RETRIEVER_PYTHON:-$PYTHON}
port=${RETRIEVER_PORT:-0}
while true; do
  # shellcheck disable=SC2086 # a list of flags
  HOST=$address PORT=$port bash retrieval_launch.sh --port_file "$file.port" ${RETRIEVER_ARGS:-} &
  server=$! status=0
  wait "$server" || status=$?
  if [[ -s $file.port ]]; then
    port=$(<"$file.port")
  elif ! tail -n 2 "$file.log" | grep -q 'another builder'; then # see search/index/build_folder.py
    exit "$status" # it was never healthy: wrong settings
  fi
  echo "the retriever ended with status $status; restarting it in 5 s" >&2
  sleep 5 &
  wait $!
done
