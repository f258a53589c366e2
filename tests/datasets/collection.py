"""A small question collection laid out as the hub's: what the builders read in tests."""

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
"""Written down here once more, so that a change of the catalogue is noticed."""


def records(name: str, split: str, count: int = 3) -> list[dict[str, Any]]:
    """Rows as the collection has them: ids say the split only, and so repeat from set to set."""
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
    """A jsonl file; text is written as it stands."""
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(text + "\n" for text in texts), encoding="utf-8")
    return path


def write_collection(folder: Path) -> Path:
    """All seven sets as `<set>/<split>.jsonl`."""
    for name, splits in SPLITS.items():
        for split in splits:
            write_jsonl(folder / name / f"{split}.jsonl", records(name, split))
    return folder
