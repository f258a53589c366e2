#!/usr/bin/env bash
# Real questions, a real model: data, cold start, GRPO, evaluation; see README.md beside this file.
#
#   python scripts/data_process/small_hotpotqa.py      # builds the default DATA_DIR
#   bash example/smollm2/run.sh                        # BUDGET=short, on a GPU where there is one
#   BUDGET=full DATA_DIR=/data/qa bash example/smollm2/run.sh
#   bash example/smollm2/run.sh --stage evaluate       # further options of python -m example.smollm2
#
# Variables: BUDGET (short, full), DEVICE (auto, cpu, cuda), DATA_DIR, OUT, SEED, PYTHON.
# The same command goes on where an earlier one stopped; finished stages are skipped.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

if [[ -z ${PYTHON:-} ]]; then
  PYTHON=python3
  [[ -x $root/.venv/bin/python ]] && PYTHON=$root/.venv/bin/python
fi

exec "$PYTHON" -m example.smollm2 --budget "${BUDGET:-short}" --device "${DEVICE:-auto}" \
  --data-dir "${DATA_DIR:-$root/data/small_hotpotqa}" --out "${OUT:-$root/runs/smollm2}" \
  --seed "${SEED:-0}" "$@"
