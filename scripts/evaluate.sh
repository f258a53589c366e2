#!/usr/bin/env bash
# Evaluates a model on every row of the data, with the agent or a baseline (docs/guides/evaluation.md).
#   bash scripts/evaluate.sh MODEL DATA... -- further options of python -m search_r1.evaluate
# OUT, RETRIEVER_URL and METHOD of the environment override the defaults.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

if [[ -z ${PYTHON:-} ]]; then
  PYTHON=python3
  [[ -x $root/.venv/bin/python ]] && PYTHON=$root/.venv/bin/python
fi

if (($# < 2)); then
  echo "usage: bash scripts/evaluate.sh MODEL DATA... [-- OPTION...]" >&2
  exit 2
fi
model=$1
shift
data=()
while (($#)) && [[ $1 != -- ]]; do
  data+=("$1")
  shift
done
if (($#)); then shift; fi

: "${METHOD:=agent}"
: "${RETRIEVER_URL:=http://127.0.0.1:8000/retrieve}"
: "${OUT:=runs/evaluation/$(basename "$model")-$METHOD}"
exec "$PYTHON" -m search_r1.evaluate run --model "$model" --data "${data[@]}" --out "$OUT" \
  --method "$METHOD" --retriever-url "$RETRIEVER_URL" "$@"
