"""Compare BM25 with and without pruning: `python -m benchmarks.retrieval.pruning --data DIR`.

Both engines rank the questions of DIR in one process, alternating, over its corpus and passages
recombined from that corpus's sentences, so that words keep their frequencies. Prints queries per
processor second; stops if a row or score differs.
"""

import argparse
import itertools
import json
import os
import random
import re
import sys
import time
from pathlib import Path

import bm25s
import numpy as np

from benchmarks.retrieval import corpora
from search_r1.retrieval.corpus import Corpus, Mask
from search_r1.retrieval.engines.bm25 import Bm25Retriever
from search_r1.retrieval.engines.bm25_pruned import PrunedRanking
from search_r1.retrieval.index_builder import BuildConfig, build_index
from search_r1.retrieval.tokenization import FOLDED

ROUNDS = 2


def recombine(source: Path, target: Path, count: int, seed: int = 0) -> None:
    """Write the rows of `source`, then others with half of their sentences from other rows."""
    draw = random.Random(seed)
    documents = [*Corpus.open(source)]
    sentences = [re.split(r"(?<=[.!?]) ", document.text) for document in documents]
    pool = [sentence for text in sentences for sentence in text]
    with target.open("w", encoding="utf-8") as file:
        for i in range(count):
            title, kept = documents[i % len(documents)].title, sentences[i % len(documents)]
            if i >= len(documents):
                kept = [s if draw.random() < 0.5 else draw.choice(pool) for s in kept]
                title = title if draw.random() < 0.5 else draw.choice(documents).title
            contents = f'"{title}"\n{" ".join(kept)}'
            row = {"id": str(i), "contents": contents}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def compare(
    engines: dict[str, Bm25Retriever], questions: list[str], k: int, allowed: Mask | None
) -> dict[str, float]:
    """Return the least processor seconds per question of each engine; raises for a difference."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    found = {}
    for _ in range(ROUNDS):
        for name, engine in engines.items():
            start = time.process_time()
            found[name] = engine.rank(questions, k, allowed)
            seconds[name].append((time.process_time() - start) / len(questions))
    (scores, rows), (other_scores, other_rows) = found.values()
    for pair in (*zip(rows, other_rows, strict=True), *zip(scores, other_scores, strict=True)):
        np.testing.assert_array_equal(*pair)
    return {name: min(times) for name, times in seconds.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=corpora.DATA)
    parser.add_argument("--cache", type=Path, default=corpora.CACHE)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--topk", type=int, nargs="+", default=[3, 10, 30, 100])
    parser.add_argument("--left", type=int, nargs="+", default=[1], help="a filter leaves 1 of N")
    options = parser.parse_args()
    questions = corpora.questions(options.data)
    folder = options.cache / f"recombined-{options.rows}"
    path, index_folder = folder / "corpus.jsonl", folder / "bm25"
    folder.mkdir(parents=True, exist_ok=True)
    if not index_folder.exists():
        recombine(options.data / "corpus.jsonl", path, options.rows)
        build_index(BuildConfig("bm25", str(path), str(folder)))
    index, corpus = bm25s.BM25.load(index_folder, mmap=True), Corpus.open(path)
    engines = {"all": Bm25Retriever(index, corpus, FOLDED)}
    engines["pruned"] = Bm25Retriever(index, corpus, FOLDED, PrunedRanking)
    for k, left in itertools.product(options.topk, options.left):
        mask = np.arange(len(corpus)) % left == 0 if left > 1 else None
        seconds = compare(engines, questions, k, mask)
        rates = ", ".join(f"{name} {1 / s:,.0f}" for name, s in seconds.items())
        ratio, load = seconds["all"] / seconds["pruned"], os.getloadavg()[0]
        sys.stdout.write(
            f"k {k}, 1 of {left}: {rates} queries/s, ratio {ratio:.2f}, load {load:.1f}\n"
        )
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
