"""Demonstrations for supervised fine-tuning: jsonl dialogues become masked token sequences.

A row is `{"prompt": [chat messages], "segments": [{"origin": "policy"|"observation", "text": …}]}`.
Each segment is tokenised by itself, as in a rollout, so that the mask is exact.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl.data import Tokenizer, render
from verl.errors import DataError, explain
from verl.protocol import Origin, Segment, Trajectory
from verl.rows import Row

ORIGINS = {"policy": Origin.POLICY, "observation": Origin.OBSERVATION}
FORM = '{"prompt": [messages], "segments": [{"origin": "policy"|"observation", "text": str}]}'


def load_demonstrations(
    path: str, tokenizer: Tokenizer, max_length: int, end_of_turn: str = ""
) -> list[Trajectory]:
    """All rows as trajectories of at most `max_length` tokens; longer ones are refused.

    `end_of_turn` is added to the last policy segment. Raises DataError with the row's number.
    """
    file = Path(path)
    if not file.is_file():
        raise DataError(explain("train_file", path, "a jsonl file", "give one that exists"))
    lines = file.read_text(encoding="utf-8").splitlines()
    rows = [(n, line) for n, line in enumerate(lines) if line.strip()]
    if not rows:
        raise DataError(explain("train_file", f"{path} without rows", "one or more", "fill it"))
    found = [_read_row(path, n, line, tokenizer, end_of_turn) for n, line in rows]
    for (number, _), trajectory in zip(rows, found, strict=True):
        if trajectory.num_tokens > max_length:
            raise DataError(
                explain(f"{path} row {number}", f"{trajectory.num_tokens} tokens",
                        f"at most max_length={max_length}", "raise max_length or drop the row")
            )  # fmt: skip
    return found


def _read_row(
    path: str, number: int, line: str, tokenizer: Tokenizer, end_of_turn: str
) -> Trajectory:
    try:
        record = json.loads(line)
        messages = tuple(dict(message) for message in record["prompt"])
        parts = [(ORIGINS[part["origin"]], str(part["text"])) for part in record["segments"]]
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            explain(f"{path} row {number}", f"{type(error).__name__} {error}", FORM, "mend the row")
        ) from error
    if not any(origin is Origin.POLICY and text for origin, text in parts):
        raise DataError(explain(f"{path} row {number}", "no policy text", FORM, "mend the row"))
    prompt = render(Row(Path(path).name, number, messages, "sft", ()), tokenizer)
    segments = [Segment(Origin.PROMPT, prompt.ids), *_segments(parts, tokenizer, end_of_turn)]
    return Trajectory(prompt, segments, group=prompt.uid)


def _segments(
    parts: Sequence[tuple[Origin, str]], tokenizer: Tokenizer, end_of_turn: str
) -> list[Segment]:
    last = max(i for i, (origin, _) in enumerate(parts) if origin is Origin.POLICY)
    segments = []
    for index, (origin, text) in enumerate(parts):
        whole = text + end_of_turn if index == last else text
        ids: tuple[Any, ...] = tuple(tokenizer.encode(whole, add_special_tokens=False))
        log_probs = (0.0,) * len(ids) if origin is Origin.POLICY else ()
        segments.append(Segment(origin, ids, whole, log_probs))
    return segments
