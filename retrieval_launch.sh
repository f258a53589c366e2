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

# What `scripts.download` put into data/wiki-18 comes before the example, unless anything is named.
named="${CORPUS_PATH:-}${INDEX_PATH:-}${RETRIEVER_NAME:-}"
if [[ " $* " =~ " --"(corpus|index|retriever)[_-](path|name) ]]; then named=flags; fi
wiki="$root/data/wiki-18"
if [[ -z "$named" && -f "$wiki/wiki-18.jsonl" ]]; then
  CORPUS_PATH="$wiki/wiki-18.jsonl"
  for INDEX_PATH in "$wiki/e5_Flat.index" "$wiki/e5_HNSW64.index" "$wiki/bm25" none; do
    if [[ -e "$INDEX_PATH" ]]; then break; fi
  done
  case "$INDEX_PATH" in
    *e5_*) RETRIEVER_NAME=e5 RETRIEVER_MODEL="${RETRIEVER_MODEL:-intfloat/e5-base-v2}" ;;
    none)
      echo "data/wiki-18 has a corpus without an index: get one (python -m scripts.download e5" \
        "--save_dir data/wiki-18), set INDEX_PATH, or CORPUS_PATH=example/corpus.jsonl" >&2
      exit 2 ;;
  esac
  echo "serving data/wiki-18 with $(basename "$INDEX_PATH"), which was downloaded; the example:" \
    "CORPUS_PATH=example/corpus.jsonl" >&2
elif [[ -z "$named" ]]; then
  echo "serving the example's corpus, a small geography; another: CORPUS_PATH=FILE.jsonl" >&2
fi

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
