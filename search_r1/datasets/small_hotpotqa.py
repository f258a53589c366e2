"""Builds a small set: HotpotQA questions with a corpus of the paragraphs that come with them.

Downloads the published files from the hub and writes train.jsonl, dev.jsonl and corpus.jsonl, which
`example/smollm2/run.sh` and `make bench` read.
"""

import itertools
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from search_r1.datasets.command import HotpotOptions
from search_r1.datasets.hub import FLASHRAG, fetch, list_files
from search_r1.datasets.question import RecordLocation, read_question, valid_questions
from verl.data.records import Record
from verl.data.rows import read_records
from verl.errors import DataError, explain
from verl.files import atomic_write

NAME = "hotpotqa"


def build(options: HotpotOptions) -> int:
    """Write the files, after both splits have been read, so that an error leaves no files."""
    source = options.local_dataset_path or download(options.local_dir / "hub")
    files: dict[str, list[dict[str, Any]]] = {}
    contents: dict[str, None] = {}  # each paragraph once, in the order of the questions
    for split, count in (("train", options.train), ("dev", options.dev)):
        file = source / NAME / f"{split}.jsonl"
        records = list(itertools.islice(read_records(str(file)), count))
        results = (
            read_question(record, RecordLocation(str(file), number, NAME, split))
            for number, record in records
        )
        files[split] = [
            {"id": q.id, "question": q.text, "golden_answers": list(q.answers),
             "data_source": NAME, "split": split}
            for q in valid_questions(results)
        ]  # fmt: skip
        contents.update(dict.fromkeys(c for record in records for c in paragraphs(file, record)))
    files["corpus"] = [{"id": str(i), "contents": text} for i, text in enumerate(contents)]
    for name, rows in files.items():
        path = options.local_dir / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as part:
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            part.write_text("".join(lines), encoding="utf-8")
        logging.info("%s: %d rows", path, len(rows))
    return 0


def download(folder: Path) -> Path:
    """Download the published files below `folder`, unless they are there; returns `folder`."""
    for file in list_files(FLASHRAG, f"{NAME}/"):
        if file.path in (f"{NAME}/train.jsonl", f"{NAME}/dev.jsonl"):
            fetch(FLASHRAG, file, folder)
    return folder


def paragraphs(file: Path, record: Record) -> Iterator[str]:
    """Yield the `contents` of the paragraphs of a question, supporting ones and others."""
    number, row = record
    try:
        context = row["metadata"]["context"]
        pairs = list(zip(context["title"], context["sentences"], strict=True))
    except (KeyError, TypeError, ValueError) as error:
        where = f"{file}, row {number} (counted from 0), metadata.context"
        expected = "as many lists of sentences as titles"
        fix = f"use the file of {FLASHRAG}"
        raise DataError(explain(where, repr(error), expected, fix)) from error
    for title, sentences in pairs:
        yield f'"{title}"\n{" ".join(" ".join(sentences).split())}'
