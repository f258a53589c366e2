#!/usr/bin/env bash
# Builds an index of a jsonl corpus; see docs/guides/retrieval.md.
# Environment: CORPUS_PATH SAVE_DIR RETRIEVER_NAME RETRIEVER_MODEL PYTHON.
# Further arguments go to the builder: bash search_r1/search/build_index.sh --batch_size 512
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

if [[ -z "${PYTHON:-}" && -x "$root/.venv/bin/python" ]]; then
  PYTHON="$root/.venv/bin/python"
fi

args=(--retrieval_method "${RETRIEVER_NAME:-bm25}")
args+=(--corpus_path "${CORPUS_PATH:-$root/example/corpus.jsonl}")
args+=(--save_dir "${SAVE_DIR:-$root/example/index/corpus}")
if [[ -n "${RETRIEVER_MODEL:-}" ]]; then args+=(--model_path "$RETRIEVER_MODEL"); fi

export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -m search_r1.search.index_builder "${args[@]}" "$@"
