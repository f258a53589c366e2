#!/usr/bin/env bash
# Adds this node to a Ray cluster, and rejoins whenever the connection is lost. Ends on SIGTERM.
#
#   HEAD_ADDRESS=10.0.0.1 bash example/multinode/worker.sh
#
# HEAD_ADDRESS  NODE_ADDRESS of head.sh (required)
# NODE_ADDRESS  this node's own address; default: the one on the route to the head
# RAY_PORT      default: 6379
# NUM_CPUS, OBJECT_STORE_MEMORY   resources that Ray may use; default: detected by Ray
# REJOIN        seconds between two attempts; default: 5
set -euo pipefail
# shellcheck source=example/multinode/cluster.sh
source "$(dirname "${BASH_SOURCE[0]}")/cluster.sh"
: "${HEAD_ADDRESS:?set it to the NODE_ADDRESS of head.sh}"
: "${NODE_ADDRESS:=$(address_towards "$HEAD_ADDRESS")}"

start=()
node_options start
child=
trap '[[ -z $child ]] || { kill -TERM "$child" && wait "$child"; }; exit 0' TERM INT
while true; do
  "$RAY" start "--address=$HEAD_ADDRESS:$RAY_PORT" "${start[@]}" &
  child=$!
  wait "$child" || echo "not in the cluster of $HEAD_ADDRESS:$RAY_PORT (status $?); trying again in ${REJOIN:-5} s" >&2
  child=
  sleep "${REJOIN:-5}"
done
