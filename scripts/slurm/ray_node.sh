#!/usr/bin/env bash
# Runs one Ray node in the foreground; removes TEMP afterwards, except on the head node.
#   ray_node.sh TEMP OPTION...               # options of `ray start`
set -euo pipefail
temp=$1
shift
ray=''
trap '[[ -z $ray ]] || kill "$ray" 2>/dev/null || true' TERM INT
mkdir -p "$temp"
export RAY_worker_niceness=${RAY_worker_niceness:-0} # the node is ours alone
"$PYTHON" -m ray.scripts.scripts start --block "$@" &
ray=$!
while kill -0 "$ray" 2>/dev/null; do wait "$ray" || true; done
[[ $* == *--head* ]] || rm -rf "$temp"
