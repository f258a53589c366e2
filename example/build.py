"""Build the example: `python -m example.build [--out example] [--seed 0]`.

Writes the corpus, the questions and the demonstrations, and refuses to when the questions cannot
be answered by the planned searches. No network; the same seed gives the same bytes.
"""

import argparse
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from example.corpus import build_passages, write_corpus
from example.demonstrations import Demonstration, build_demonstrations, write_demonstrations
from example.questions import Question, build_questions, write_questions
from example.retrieval import Audit, PassageSearch, audit, without_shortcuts
from example.world import Split, World, build_world
from search_r1.search.schema import Document


@dataclass(frozen=True)
class Example:
    """Everything the builder makes, before it is written."""

    world: World
    passages: list[Document]
    train: list[Question]
    validation: list[Question]
    demonstrations: list[Demonstration]
    audit: Audit


def build_example(seed: int = 0, progress: Progress | None = None) -> Example:
    """Build and check the whole example in memory; ValueError when a check fails."""
    progress = progress or Progress(disable=True)
    task = progress.add_task("building the example", total=6)
    world = build_world(seed)
    progress.advance(task)
    passages = build_passages(world)
    search = PassageSearch(passages)
    progress.advance(task)
    train, validation = (
        build_questions(world, split, lambda found: without_shortcuts(found, search), seed)
        for split in Split
    )
    progress.advance(task, 2)
    result = audit([*train, *validation], search)
    result.check()
    progress.advance(task)
    demonstrations = build_demonstrations(train, search, seed)
    progress.advance(task)
    return Example(world, passages, train, validation, demonstrations, result)


def write_example(example: Example, out: Path) -> None:
    """Write `corpus.jsonl` and `data/{train.parquet,val.parquet,sft.jsonl}` under a folder."""
    data = out / "data"
    data.mkdir(parents=True, exist_ok=True)
    write_corpus(example.passages, out / "corpus.jsonl")
    write_questions(example.train, data / "train.parquet")
    write_questions(example.validation, data / "val.parquet")
    write_demonstrations(example.demonstrations, data / "sft.jsonl")


def count_table(example: Example) -> Table:
    """What was built, as a table for the terminal."""
    table = Table("what", "train", "val", title="The example")
    halves = (Split.TRAIN, Split.VALIDATION)
    table.add_row("countries", *(str(len(example.world.countries_of(half))) for half in halves))
    table.add_row("cities", *(str(len(example.world.cities_of(half))) for half in halves))
    for kind in ("geo_single", "geo_two_hop"):
        counts = (
            sum(question.data_source == kind for question in questions)
            for questions in (example.train, example.validation)
        )
        table.add_row(f"questions {kind}", *map(str, counts))
    searches = Counter(len(demo.segments) // 2 for demo in example.demonstrations)
    for num_searches, count in sorted(searches.items()):
        table.add_row(f"demonstrations with {num_searches} searches", str(count), "-")
    table.add_row("passages (both halves)", str(len(example.passages)), "")
    table.add_row("planned searches that find", f"{example.audit.plan_share:.2%}", "")
    return table


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Build the example corpus, questions and dialogues."
    )
    parser.add_argument("--out", type=Path, default=Path("example"), help="folder to write to")
    parser.add_argument("--seed", type=int, default=0, help="of the split and of every choice")
    arguments = parser.parse_args()
    console = Console()
    with Progress(console=console) as progress:
        example = build_example(arguments.seed, progress)
    write_example(example, arguments.out)
    console.print(count_table(example))


if __name__ == "__main__":
    main()
