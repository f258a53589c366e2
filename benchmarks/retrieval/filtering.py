"""What a filter costs: `python -m benchmarks.retrieval.filtering --data DIR`.

The rows of DIR's corpus get fields that leave a half, a tenth, a hundredth and a thousandth of
them. BM25 and FAISS Flat (encoder `hash:384`) answer the questions with each filter and without,
alternating. Prints processor milliseconds per question; stops if a hit is not what is left of a
ranking of all passages.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.retrieval import corpora
from search_r1.retrieval.engines.registry import build_retriever
from search_r1.retrieval.fields import FILE_NAME, key
from search_r1.retrieval.index_builder import BuildConfig, build_index, index_folder
from search_r1.retrieval.settings import EncoderConfig, RetrieverConfig

SHARES = {"half": 2, "tenth": 10, "hundredth": 100, "thousandth": 1000}
MODEL = "hash:384"
ROUNDS, NUM_CHECKED = 2, 20


def add_fields(source: Path, target: Path) -> int:
    """Write the rows with a field for each share; return their number."""
    lines = source.read_text(encoding="utf-8").splitlines()
    with target.open("w", encoding="utf-8") as file:
        for number, line in enumerate(lines):
            row = json.loads(line) | {name: number % n for name, n in SHARES.items()}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return len(lines)


def check(engine: Any, questions: list[str], masks: dict[str, Any], k: int) -> None:
    """Raise an AssertionError unless filtered rankings are what is left of a full one."""
    scores, rows = engine.rank(questions, engine.num_documents)
    for name, mask in masks.items():
        if mask is None:
            continue
        found = engine.rank(questions, k, mask)
        for i in range(len(questions)):
            left = [pair for pair in zip(scores[i], rows[i], strict=True) if mask[pair[1]]][:k]
            assert [*zip(found[0][i], found[1][i], strict=True)] == left, (name, questions[i])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=corpora.DATA)
    parser.add_argument("--cache", type=Path, default=corpora.CACHE)
    parser.add_argument("--topk", type=int, default=3)
    parser.add_argument("--questions", type=int, default=1000)
    options = parser.parse_args()
    folder = options.cache / "filtering"
    folder.mkdir(parents=True, exist_ok=True)
    path, questions = folder / "corpus.jsonl", corpora.questions(options.data)[: options.questions]
    add_fields(options.data / "corpus.jsonl", path)
    for method in ("bm25", "flat"):
        seconds = {}
        for names in ((), tuple(SHARES)):
            start = time.process_time()
            build_index(BuildConfig(method, str(path), str(folder), MODEL, filter_fields=names))
            seconds[len(names)] = time.process_time() - start
        size = (index_folder(folder, method) / FILE_NAME).stat().st_size
        config = RetrieverConfig(method, str(path), str(folder), encoder=EncoderConfig(MODEL))
        engine: Any = build_retriever(config)
        masks = {n: engine.fields.mask(((key(n, 0),),)) for n in SHARES}
        measure(engine, {"no filter": None} | masks, questions, options.topk)
        sys.stdout.write(f"{method}: built in {seconds[0]:.1f} s, with fields in "
                         f"{seconds[len(SHARES)]:.1f} s, {size:,} bytes more\n")  # fmt: skip
    return 0


def measure(engine: Any, masks: dict[str, Any], questions: list[str], k: int) -> None:
    """Print the least processor time per question for each filter, after the check."""
    check(engine, questions[:NUM_CHECKED], masks, k)
    best: dict[str, float] = {}
    for _ in range(ROUNDS):
        for name, mask in masks.items():
            start = time.process_time()
            for i in range(0, len(questions), 64):
                engine.hits(engine.rank(questions[i : i + 64], k, mask))
            spent = (time.process_time() - start) / len(questions)
            best[name] = min(spent, best.get(name, spent))
    rates = ", ".join(f"{name} {1000 * spent:.3f} ms" for name, spent in best.items())
    sys.stdout.write(f"{engine.name}, k {k}: {rates}; load {os.getloadavg()[0]:.1f}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
