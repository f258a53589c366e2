"""Recall by question set, and the rate with 64 clients, of engines alone and joined.

`python -m benchmarks.retrieval.fusion DATA INDEX --engine "bm25" --engine "bm25+e5 MODEL 0.8 0.2"`:
DATA is a folder with corpus.jsonl, train.jsonl and dev.jsonl; INDEX has the indexes by name. A
question counts if one of the top documents contains an accepted answer as whole words; questions
whose answer is yes or no are left out.
"""

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.retrieval.load import LoadReport, run_load
from search_r1.retrieval.local_server import LocalServer
from search_r1.rewards.normalize import OPPOSITES, contains_answer, normalize_answer

Question = Mapping[str, Any]
SPLITS = ("train", "dev")


def read_questions(data: Path) -> list[Question]:
    """Return the questions of both splits that a passage can answer, each once."""
    lines = [line for split in SPLITS for line in (data / f"{split}.jsonl").open(encoding="utf-8")]
    rows = {row["question"]: row for row in map(json.loads, lines)}
    return [row for row in rows.values() if not is_yes_no(row["golden_answers"])]


def is_yes_no(answers: Sequence[str]) -> bool:
    return {normalize_answer(answer) for answer in answers} <= set(OPPOSITES)


def recalls(questions: Sequence[Question], report: LoadReport) -> dict[tuple[str, str], float]:
    """Return the share of answered questions by split and set. An error counts as none."""
    found: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for row, results in zip(questions, report.answers, strict=True):
        texts = [hit["document"]["contents"] for hit in (results or [[]])[0]]
        is_found = any(contains_answer(text, row["golden_answers"]) for text in texts)
        for split in (row["split"], "both"):
            found[split, row["data_source"]].append(is_found)
    return {key: sum(values) / len(values) for key, values in found.items()}


def flags_of(engine: str, data: Path, index: Path) -> list[str]:
    """Return the server's flags for `NAME [MODEL [WEIGHT ...]] [--flag value ...]`."""
    words = engine.split()
    end = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    (name, *model_and_weights), others = words[:end], words[end:]
    flags = ["--retriever_name", name, "--corpus_path", str(data / "corpus.jsonl")]
    flags += ["--index_path", str(index), *others]
    if model_and_weights:
        model, *weights = model_and_weights
        flags += ["--retriever_model", model]
        flags += ["--fusion_weights", *weights] if weights else []
    return flags


def measure(engine: str, data: Path, index: Path, questions: Sequence[Question]) -> str:
    """Return a row of the table: recall@3 by set (dev's; nan: it has none), rate and p99."""
    with LocalServer(flags_of(engine, data, index), timeout=300.0) as server:
        report = run_load(server.url, [row["question"] for row in questions])
    shares = recalls(questions, report)
    names = sorted({name for _, name in shares})
    cells = [
        f"{100 * shares['both', name]:.1f} ({100 * shares.get(('dev', name), math.nan):.1f})"
        for name in names
    ]
    rate = f"{report.rate:,.0f} queries/s"
    return " | ".join([engine, *cells, rate, f"{1000 * report.latency(99):.0f} ms"])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("index", type=Path)
    parser.add_argument("--engine", action="append", required=True, help="NAME [MODEL [WEIGHT …]]")
    parsed = parser.parse_args(argv)
    questions = read_questions(parsed.data)
    names = sorted({row["data_source"] for row in questions})
    sys.stdout.write(" | ".join(["engine", *names, "rate", "p99"]) + "\n")
    for engine in parsed.engine:
        sys.stdout.write(measure(engine, parsed.data, parsed.index, questions) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
