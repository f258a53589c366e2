"""Questions with a corpus of their own: HotpotQA's, with the paragraphs that come with each.

Fetches the published files from the hub and writes train.jsonl, dev.jsonl and corpus.jsonl, which
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
from verl.data.rows import Record, read_records
from verl.errors import DataError, explain
from verl.files import atomic_write

NAME = "hotpotqa"


def build(options: HotpotOptions) -> int:
    """Read both splits first, so that mistakes end before anything is written."""
    source = options.local_dataset_path or download(options.local_dir / "hub")
    files: dict[str, list[dict[str, Any]]] = {}
    contents: dict[str, None] = {}  # each paragraph once, in the order of the questions
    for split, count in (("train", options.train), ("dev", options.dev)):
        file = source / NAME / f"{split}.jsonl"
        records = list(itertools.islice(read_records(str(file)), count))
        places = [RecordLocation(str(file), number, NAME, split) for number, _ in records]
        read = (read_question(r, p) for (_, r), p in zip(records, places, strict=True))
        files[split] = [
            {"id": q.id, "question": q.text, "golden_answers": list(q.answers),
             "data_source": NAME, "split": split}
            for q in valid_questions(read, drop_bad=False)
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
    """The set's published files below `folder`, where they stay for the next time."""
    for file in list_files(FLASHRAG, f"{NAME}/"):
        if file.path in (f"{NAME}/train.jsonl", f"{NAME}/dev.jsonl"):
            fetch(FLASHRAG, file, folder)
    return folder


def paragraphs(file: Path, record: Record) -> Iterator[str]:
    """`contents` of the paragraphs that come with a question, the supporting ones among them."""
    number, row = record
    try:
        context = row["metadata"]["context"]
        pairs = list(zip(context["title"], context["sentences"], strict=True))
    except (KeyError, TypeError, ValueError) as error:
        place = f"{file}, row {number} (counted from 0), metadata.context"
        expected = "as many lists of sentences as titles"
        fix = f"take the file of {FLASHRAG}"
        raise DataError(explain(place, repr(error), expected, fix)) from error
    for title, sentences in pairs:
        yield f'"{title}"\n{" ".join(" ".join(sentences).split())}'
