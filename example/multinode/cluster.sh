# shellcheck shell=bash
# Sourced by head.sh and worker.sh: their common parts. Every value may be set in the environment.

: "${RAY_PORT:=6379}"
if [[ -z ${RAY:-} ]]; then
  RAY=ray
  root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
  [[ -x $root/.venv/bin/ray ]] && RAY=$root/.venv/bin/ray
fi

# Ray's head requires a token if one exists; workers and runs must then be configured to send it.
if [[ -z ${RAY_AUTH_MODE:-} ]]; then
  if [[ -n ${RAY_AUTH_TOKEN:-} || -e ${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token} ]]; then
    RAY_AUTH_MODE=token
  else
    RAY_AUTH_MODE=disabled
  fi
  export RAY_AUTH_MODE
fi

# Prints the address of this node from which packets to $1 are sent.
address_towards() {
  python3 -c 'import socket, sys
probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
probe.connect((sys.argv[1], 9))
print(probe.getsockname()[0])' "$1"
}

# node_options ARRAY: stores the options of `ray start` that head and workers share in ARRAY.
node_options() {
  local -n options=$1
  # With usage reports off, Ray still reports that they are off; nothing listens at this address.
  export RAY_USAGE_STATS_REPORT_URL=http://127.0.0.1:9/
  options=(--block --disable-usage-stats "--node-ip-address=$NODE_ADDRESS")
  [[ -z ${NUM_CPUS:-} ]] || options+=("--num-cpus=$NUM_CPUS")
  [[ -z ${OBJECT_STORE_MEMORY:-} ]] || options+=("--object-store-memory=$OBJECT_STORE_MEMORY")
}
