#!/usr/bin/env bash
# The first node of a Ray cluster; stays in the foreground until it is stopped (ctrl-c, SIGTERM).
#
#   NODE_ADDRESS=10.0.0.1 bash example/multinode/head.sh
#
# NODE_ADDRESS  the address that the other nodes reach this one by (needed)
# RAY_PORT      6379
# NUM_CPUS, OBJECT_STORE_MEMORY   what Ray may use; found by itself where unset
# DASHBOARD     true: the dashboard on 127.0.0.1:8265, which `ray job submit` needs
set -euo pipefail
# shellcheck source=example/multinode/cluster.sh
source "$(dirname "${BASH_SOURCE[0]}")/cluster.sh"
: "${NODE_ADDRESS:?set it to the address that the other nodes reach this one by}"

start=()
node_options start
echo "head on $NODE_ADDRESS:$RAY_PORT, authentication: $RAY_AUTH_MODE"
exec "$RAY" start --head "--port=$RAY_PORT" "--include-dashboard=${DASHBOARD:-true}" "${start[@]}"
