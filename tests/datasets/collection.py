"""A small question collection in the layout of the hub, for the tests of the builders."""

import json
from pathlib import Path
from typing import Any

SPLITS = {
    "nq": ("train", "dev", "test"),
    "triviaqa": ("train", "dev", "test"),
    "popqa": ("test",),
    "hotpotqa": ("train", "dev"),
    "2wikimultihopqa": ("train", "dev"),
    "musique": ("train", "dev"),
    "bamboogle": ("test",),
}
"""Repeated here, so that a change of the list of published sets fails a test."""


def records(name: str, split: str, count: int = 3) -> list[dict[str, Any]]:
    """Return rows as in the collection; ids have only the split, so they repeat between sets."""
    return [
        {
            "id": f"{split}_{number}",
            "question": f" what is {name} {split} {number}" + ("?" if number else ""),
            "golden_answers": [f"{name} {number}", "other"],
            "metadata": {"context": [{"title": "t", "sentences": ["a", "b"]}]},
        }
        for number in range(count)
    ]


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    """Write a jsonl file; rows that are text are written unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(text + "\n" for text in texts), encoding="utf-8")
    return path


def write_collection(folder: Path) -> Path:
    """Write all seven sets as `<set>/<split>.jsonl`."""
    for name, splits in SPLITS.items():
        for split in splits:
            write_jsonl(folder / name / f"{split}.jsonl", records(name, split))
    return folder
