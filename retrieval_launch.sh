#!/usr/bin/env bash
# Starts the retrieval server; see docs/guides/retrieval.md.
# Environment: CORPUS_PATH INDEX_PATH RETRIEVER_NAME RETRIEVER_MODEL TOPK HOST PORT PYTHON.
# Further arguments go to the server: bash retrieval_launch.sh --faiss_gpu
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

if [[ -z "${PYTHON:-}" && -x "$root/.venv/bin/python" ]]; then
  PYTHON="$root/.venv/bin/python"
fi
PYTHON="${PYTHON:-python3}"

RETRIEVER_NAME="${RETRIEVER_NAME:-bm25}"
CORPUS_PATH="${CORPUS_PATH:-$root/example/corpus.jsonl}"

args=(--retriever_name "$RETRIEVER_NAME" --corpus_path "$CORPUS_PATH")
args+=(--topk "${TOPK:-3}" --host "${HOST:-127.0.0.1}" --port "${PORT:-8000}")
if [[ -n "${INDEX_PATH:-}" ]]; then args+=(--index_path "$INDEX_PATH"); fi
if [[ -n "${RETRIEVER_MODEL:-}" ]]; then args+=(--retriever_model "$RETRIEVER_MODEL"); fi

# Arguments can override corpus and engine, so only the default corpus is checked here.
if [[ "$RETRIEVER_NAME" != empty && " $* " != *" --corpus_path"* \
      && " $* " != *" empty "* && ! -f "$CORPUS_PATH" ]]; then
  echo "corpus $CORPUS_PATH does not exist: set CORPUS_PATH to a JSONL file such as example/corpus.jsonl" >&2
  exit 2
fi

export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m search_r1.search.retrieval_server "${args[@]}" "$@"
