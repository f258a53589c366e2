"""A few invented questions and passages, in the layout of the recipe's data folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PASSAGES = {
    "Maple Harbour": (
        "Maple Harbour is a small fishing town on the northern coast of Ostland. It was "
        "founded in 1742 by the merchant Ada Quill. The harbour is known for its red "
        "lighthouse."
    ),
    "Ada Quill": (
        "Ada Quill (1701 – 1768) was a merchant who was born in the village of Dunmere. She "
        "traded in salt, timber and wool."
    ),
    "Dunmere": (
        "Dunmere is a village beside the river Teal. Its wool market is held every autumn."
    ),
    "Teal Bridge": (
        "The Teal Bridge was designed by the engineer Bruno Vance and opened in 1899. It is "
        "the longest wooden bridge of the country."
    ),
    "Silver Kite": ("Silver Kite is a novel by Nora Lindqvist. It won the Lantern Prize in 1983."),
    "Lantern Prize": (
        "The Lantern Prize is awarded every spring in the city of Varn for a first novel."
    ),
    "Oatfield Rovers": (
        "Oatfield Rovers is a football club. Its goalkeeper Tom Adeyemi kept 21 clean sheets "
        "in the season of 1976."
    ),
    "Glass Beetle": (
        "The glass beetle lives in caves. Its larva feeds on moss and sleeps through winter."
    ),
}

QUESTIONS: dict[str, list[tuple[str, list[str]]]] = {
    "train": [
        ("who founded the town of Maple Harbour?", ["Ada Quill"]),
        ("Who designed the Teal Bridge?", ["Bruno Vance", "Vance"]),
        ("who wrote the novel Silver Kite?", ["Nora Lindqvist"]),
        ("In which city is the Lantern Prize awarded?", ["Varn"]),
        ("how many clean sheets did the goalkeeper of Oatfield Rovers keep?", ["21"]),
        ("what does the larva of the glass beetle feed on?", ["the moss"]),
        ("Who invented the steam kettle of Brimley?", ["Otto Grane"]),
        ("is Dunmere a village?", ["yes"]),
    ],
    "dev": [
        ("when was Maple Harbour founded?", ["1742"]),
        ("When was the Teal Bridge opened?", ["1899"]),
        ("which prize did Silver Kite win?", ["Lantern Prize", "the Lantern Prize"]),
    ],
}
UNANSWERABLE = (6, 7)
"""Numbers of training questions whose answer is in no passage."""


def corpus() -> list[dict[str, str]]:
    """Return the passages as rows of corpus.jsonl."""
    return [
        {"id": str(i), "contents": f'"{title}"\n{text}'}
        for i, (title, text) in enumerate(PASSAGES.items())
    ]


def rows(split: str) -> list[dict[str, Any]]:
    """Return the questions of a split as rows of train.jsonl or dev.jsonl."""
    return [
        {"id": f"{split}_{i}", "question": question, "golden_answers": answers,
         "data_source": ("nq", "hotpotqa")[i % 2], "split": split}
        for i, (question, answers) in enumerate(QUESTIONS[split])
    ]  # fmt: skip


def write_data(folder: Path) -> Path:
    """Write the data folder and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("corpus", corpus()), ("train", rows("train")), ("dev", rows("dev"))):
        text = "".join(json.dumps(row) + "\n" for row in content)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return folder
