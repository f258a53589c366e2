"""Demonstrations for supervised fine-tuning: jsonl dialogues become masked token sequences.

A row is `{"prompt": [chat messages], "segments": [{"origin": "policy"|"observation", "text": …}]}`.
Each segment is tokenised by itself, as in a rollout, so that the mask is exact. A row that names
its tokenizer (`verl.sft.rejection_sampling` writes such) brings the ids of every segment
instead, the prompt's included, and they are taken as they are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from verl.data import Tokenizer, render
from verl.data.rows import Row
from verl.data.trajectories import TOKENIZER, Vocabulary, fingerprint
from verl.errors import DataError, explain
from verl.types import Origin, Prompt, Segment, Trajectory

ORIGINS = {"policy": Origin.POLICY, "observation": Origin.OBSERVATION}
FORM = '{"prompt": [messages], "segments": [{"origin": "policy"|"observation", "text": str}]}'
EXACT_ORIGINS = {"prompt": Origin.PROMPT, **ORIGINS}
EXACT_FORM = (
    '{"tokenizer": str, "segments": [{"origin": …, "text": str, "ids": [int]}]}, prompt first'
)


class SftTokenizer(Tokenizer, Vocabulary, Protocol):
    """What demonstrations need of a Hugging Face tokenizer."""


def load_demonstrations(
    path: str, tokenizer: SftTokenizer, max_length: int, end_of_turn: str = ""
) -> list[Trajectory]:
    """All rows as trajectories of at most `max_length` tokens; longer ones are refused.

    `end_of_turn` is added to the last policy segment. Raises DataError with the row's number.
    """
    file = Path(path)
    if not file.is_file():
        raise DataError(explain("train_file", path, "a jsonl file", "give one that exists"))
    lines = file.read_text(encoding="utf-8").split("\n")  # others end lines within a JSON string
    rows = [(n, line) for n, line in enumerate(lines) if line.strip()]
    if not rows:
        raise DataError(explain("train_file", f"{path} without rows", "one or more", "fill it"))
    records = [(n, _read_record(path, n, line)) for n, line in rows]
    own = fingerprint(tokenizer) if any(TOKENIZER in record for _, record in records) else ""
    found = [
        _exact_row(path, n, record, tokenizer, own, end_of_turn)
        if TOKENIZER in record
        else _read_row(path, n, record, tokenizer, end_of_turn)
        for n, record in records
    ]
    for (number, _), trajectory in zip(rows, found, strict=True):
        if trajectory.num_tokens > max_length:
            raise DataError(
                explain(f"{path} row {number}", f"{trajectory.num_tokens} tokens",
                        f"at most max_length={max_length}", "raise max_length or drop the row")
            )  # fmt: skip
    return found


def _read_record(path: str, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise _malformed(path, number, error, FORM) from error
    if not isinstance(record, dict):
        raise _malformed(path, number, TypeError(type(record).__name__), FORM)
    return record


def _malformed(path: str, number: int, error: Exception, form: str) -> DataError:
    got = f"{type(error).__name__} {error}"
    return DataError(explain(f"{path} row {number}", got, form, "mend the row"))


def _exact_row(
    path: str, number: int, record: dict[str, Any], tokenizer: Tokenizer, own: str, end: str
) -> Trajectory:
    """A row with ids of its own; `own` is our tokenizer's fingerprint, `end` closes the last turn.

    An end that the policy wrote itself is not written twice.
    """
    where = f"{path} row {number}"
    if record[TOKENIZER] != own:
        fix = "give model_path the model (or one with the tokenizer) whose run made the rows"
        expected = f"{own[:12]}…, the tokenizer of model_path: ids mean other words in another"
        raise DataError(explain(where, f"ids of tokenizer {record[TOKENIZER]}", expected, fix))
    try:
        segments = [
            _segment(
                EXACT_ORIGINS[part["origin"]], tuple(int(i) for i in part["ids"]), part["text"]
            )
            for part in record["segments"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise _malformed(path, number, error, EXACT_FORM) from error
    policy = [i for i, s in enumerate(segments) if s.origin is Origin.POLICY and s.ids]
    if not policy or segments[0].origin is not Origin.PROMPT:
        got = "no policy ids" if not policy else "no prompt at the start"
        raise DataError(explain(where, got, EXACT_FORM, "mend the row"))
    last = segments[policy[-1]]
    closing = tuple(tokenizer.encode(end, add_special_tokens=False)) if end else ()
    if closing and last.ids[-len(closing) :] != closing:
        segments[policy[-1]] = _segment(last.origin, last.ids + closing, last.text + end)
    prompt = Prompt(f"{Path(path).name}#{number}", segments[0].ids, "sft", (), {}, segments[0].text)
    return Trajectory(prompt, segments, group=prompt.uid)


def _read_row(
    path: str, number: int, record: dict[str, Any], tokenizer: Tokenizer, end_of_turn: str
) -> Trajectory:
    try:
        messages = tuple(dict(message) for message in record["prompt"])
        parts = [(ORIGINS[part["origin"]], str(part["text"])) for part in record["segments"]]
    except (KeyError, TypeError, ValueError) as error:
        raise _malformed(path, number, error, FORM) from error
    if not any(origin is Origin.POLICY and text for origin, text in parts):
        raise DataError(explain(f"{path} row {number}", "no policy text", FORM, "mend the row"))
    prompt = render(Row(Path(path).name, number, messages, "sft", ()), tokenizer)
    start = Segment(Origin.PROMPT, prompt.ids, prompt.text)
    return Trajectory(prompt, [start, *_encoded(parts, tokenizer, end_of_turn)], group=prompt.uid)


def _encoded(
    parts: Sequence[tuple[Origin, str]], tokenizer: Tokenizer, end_of_turn: str
) -> list[Segment]:
    last = max(i for i, (origin, _) in enumerate(parts) if origin is Origin.POLICY)
    segments = []
    for index, (origin, text) in enumerate(parts):
        whole = text + end_of_turn if index == last else text
        ids = tuple(tokenizer.encode(whole, add_special_tokens=False))
        segments.append(_segment(origin, ids, whole))
    return segments


def _segment(origin: Origin, ids: tuple[int, ...], text: str) -> Segment:
    """A segment that no engine sampled: log-probs of 0 where the form asks for some."""
    return Segment(origin, ids, text, (0.0,) * len(ids) if origin is Origin.POLICY else ())
