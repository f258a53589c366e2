"""Write a harder world: `python -m example.hard --out DIR`.

To the example's countries and cities it adds invented museums and towns, and with them five kinds
of questions: of three searches, of none, of none that helps, about one of two places of nearly the
same name, and about a number that was replaced. A search shows two documents. As in the example,
the demonstrations teach the tags and how each kind is answered, but most answer carelessly.
"""

import argparse
import itertools
import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from example.geography import CORPUS, TEMPLATE, is_validation, real_world
from example.hard_questions import Kind, Task, Tasks, invented_names
from search_r1.agent.tags import TEMPLATES
from search_r1.retrieval.engines.bm25 import open_retriever
from search_r1.retrieval.settings import RetrieverConfig

TOPK = 2
"""Documents for each search, so that both of two that differ are read."""
COUNTS = {"train": 240, "sft": 40, "val": 18}
"""Questions of each kind; those of the demonstrations (sft) are of the training half, too."""
CAREFUL = {
    Kind.SINGLE: 0.5, Kind.TWO_HOP: 0.25, Kind.THREE_HOP: 0.25, Kind.NO_SEARCH: 0.8,
    Kind.UNANSWERABLE: 0.5, Kind.NAMESAKE: 0.5, Kind.OUTDATED: 0.5,
}  # fmt: skip
"""Fraction of the demonstrations that answer correctly."""
GOLDEN_RATIO = (5**0.5 - 1) / 2


def build_tasks() -> dict[str, list[Task]]:
    """Return the tasks of each file, the kinds in turn, so that small batches have each of them."""
    names = invented_names(set(re.findall(r"\w+", CORPUS.read_text(encoding="ascii").lower())))
    lists: dict[str, list[Task]] = {}
    for half in (("train", "sft"), ("val",)):
        has = is_validation if half == ("val",) else lambda country: not is_validation(country)
        tasks = Tasks(real_world(has), names, random.Random(f"hard-{half[0]}"))
        by_kind = {kind: tasks.of(kind) for kind in Kind}
        for name in half:
            rows = [itertools.islice(by_kind[kind], COUNTS[name]) for kind in Kind]
            lists[name] = [task for turn in zip(*rows, strict=True) for task in turn]
    return lists


def write_world(out: Path) -> None:
    """Write corpus.jsonl, train.parquet, val.parquet and sft.jsonl into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    lists = build_tasks()
    write_corpus(out / "corpus.jsonl", itertools.chain(*lists.values()))
    for name in ("train", "val"):
        rows = [task.row(name, index) for index, task in enumerate(lists[name])]
        pq.write_table(pa.Table.from_pylist(rows), out / f"{name}.parquet")
    observations = found_for(
        [search.query for task in lists["sft"] for search in task.searches], out / "corpus.jsonl"
    )
    with (out / "sft.jsonl").open("w", encoding="utf-8") as file:
        for index, task in enumerate(lists["sft"]):
            turn, place = divmod(index, len(Kind))
            # Spread evenly, and not in step with the ways and facts that take turns.
            is_careful = (turn * GOLDEN_RATIO + place / len(Kind)) % 1 < CAREFUL[task.kind]
            file.write(json.dumps(task.dialogue(is_careful, observations)) + "\n")


def write_corpus(path: Path, tasks: Iterator[Task]) -> None:
    """Write the example's corpus, then the documents of the tasks that it does not have."""
    known = CORPUS.read_text(encoding="ascii")
    old = {json.loads(line)["id"] for line in known.splitlines()}
    documents = {d.id: d for task in tasks for search in task.searches for d in search.documents}
    new = (json.dumps(d.to_row()) + "\n" for d in documents.values() if d.id not in old)
    path.write_text(known + "".join(new), encoding="ascii")


def found_for(queries: Sequence[str], corpus: Path) -> dict[str, str]:
    """Return the observation for each query, by the demo's retriever."""
    retriever = open_retriever(RetrieverConfig(corpus_path=str(corpus)))
    shown = TEMPLATES[TEMPLATE].observation
    found = retriever.search(list(queries), TOPK)
    return {
        q: shown([hit.document for hit in hits]) for q, hits in zip(queries, found, strict=True)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a harder world than the example's.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    write_world(parser.parse_args().out)


if __name__ == "__main__":
    main()
