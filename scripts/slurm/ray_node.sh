#!/usr/bin/env bash
# One node of Ray, in the foreground; what it wrote below TEMP goes with it.
#   ray_node.sh TEMP OPTION...               # options of `ray start`
set -euo pipefail
temp=$1
shift
ray=''
trap '[[ -z $ray ]] || kill "$ray" 2>/dev/null || true' TERM INT
mkdir -p "$temp"
"$PYTHON" -m ray.scripts.scripts start --block "$@" &
ray=$!
while kill -0 "$ray" 2>/dev/null; do wait "$ray" || true; done
[[ $* == *--head* ]] || rm -rf "$temp"
