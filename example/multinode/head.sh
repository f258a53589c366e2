#!/usr/bin/env bash
# Starts the first node of a Ray cluster; runs in the foreground until stopped (ctrl-c, SIGTERM).
#
#   NODE_ADDRESS=10.0.0.1 bash example/multinode/head.sh
#
# NODE_ADDRESS  address at which the other nodes reach this node (required)
# RAY_PORT      default: 6379
# NUM_CPUS, OBJECT_STORE_MEMORY   resources that Ray may use; default: detected by Ray
# DASHBOARD     default: true, the dashboard on 127.0.0.1:8265, which `ray job submit` needs
set -euo pipefail
# shellcheck source=example/multinode/cluster.sh
source "$(dirname "${BASH_SOURCE[0]}")/cluster.sh"
: "${NODE_ADDRESS:?set it to the address at which the other nodes reach this node}"

start=()
node_options start
echo "head on $NODE_ADDRESS:$RAY_PORT, authentication: $RAY_AUTH_MODE"
exec "$RAY" start --head "--port=$RAY_PORT" "--include-dashboard=${DASHBOARD:-true}" "${start[@]}"
