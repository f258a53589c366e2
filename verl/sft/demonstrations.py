"""Demonstrations for supervised fine-tuning: jsonl dialogues become masked token sequences.

A row is `{"prompt": [chat messages], "segments": [{"origin": "policy"|"observation", "text": …}]}`.
Each segment is tokenised by itself, as in a rollout, so that the mask is exact. A row that names
its tokenizer (`verl.sft.rejection_sampling` writes such) brings the ids of every segment
instead, the prompt's included, and they are taken as they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from verl.data import Tokenizer, render
from verl.data.prompts import encode_within
from verl.data.rows import BadRow, Row, prompt_of, read_jsonl
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
    records = [(n, _checked(f"{path} row {n}", row)) for n, row in read_jsonl(path)]
    if not records:
        raise DataError(explain("train_file", f"{path} without rows", "one or more", "fill it"))
    own = fingerprint(tokenizer) if any(TOKENIZER in record for _, record in records) else ""
    found = []
    for number, record in records:
        where, row = f"{path} row {number}", (file.name, number, record)
        if TOKENIZER in record:
            _check_tokenizer(where, record[TOKENIZER], own)
            trajectory = _exact_row(where, *row, tokenizer, end_of_turn)
        else:
            trajectory = _read_row(where, *row, tokenizer, end_of_turn, max_length)
        if trajectory.num_tokens > max_length:
            fix = "raise max_length or drop the row"
            got, expected = f"{trajectory.num_tokens} tokens", f"at most max_length={max_length}"
            raise DataError(explain(where, got, expected, fix))
        found.append(trajectory)
    return found


def _checked(where: str, record: Any) -> dict[str, Any]:
    if isinstance(record, BadRow):
        raise DataError(record.problem)
    if not isinstance(record, dict):
        raise _malformed(where, TypeError(type(record).__name__), FORM)
    return record


def _malformed(where: str, problem: Exception | str, form: str) -> DataError:
    got = problem if isinstance(problem, str) else f"{type(problem).__name__} {problem}"
    return DataError(explain(where, got, form, "correct the row"))


def _check_tokenizer(where: str, given: object, own: str) -> None:
    if given != own:
        fix = "give model_path the model (or one with the tokenizer) whose run made the rows"
        expected = f"{own[:12]}…, the tokenizer of model_path: ids mean other words in another"
        raise DataError(explain(where, f"ids of tokenizer {given}", expected, fix))


def _exact_row(
    where: str, file: str, number: int, record: dict[str, Any], tokenizer: Tokenizer, end: str
) -> Trajectory:
    """A row with ids of its own. An end of turn that the policy wrote is not written twice."""
    try:
        segments = [
            _segment(
                EXACT_ORIGINS[part["origin"]], tuple(int(i) for i in part["ids"]), part["text"]
            )
            for part in record["segments"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise _malformed(where, error, EXACT_FORM) from error
    policy = [i for i, s in enumerate(segments) if s.origin is Origin.POLICY and s.ids]
    if not policy or segments[0].origin is not Origin.PROMPT:
        got = "no policy ids" if not policy else "no prompt at the start"
        raise _malformed(where, got, EXACT_FORM)
    last = segments[policy[-1]]
    closing = tuple(tokenizer.encode(end, add_special_tokens=False)) if end else ()
    if closing and last.ids[-len(closing) :] != closing:
        segments[policy[-1]] = _segment(last.origin, last.ids + closing, last.text + end)
    prompt = Prompt(f"{file}#{number}", segments[0].ids, "sft", (), {}, segments[0].text)
    return Trajectory(prompt, segments, group=prompt.uid)


def _read_row(
    where: str, file: str, number: int, record: dict[str, Any], tokenizer: Tokenizer, end: str,
    limit: int,
) -> Trajectory:  # fmt: skip
    """A row of text, whose last policy segment gets the end of turn."""
    try:
        messages = prompt_of(record["prompt"])
        parts = [(ORIGINS[part["origin"]], part["text"]) for part in record["segments"]]
        if not all(isinstance(text, str) for _, text in parts):
            raise TypeError("a text that is none")
    except (KeyError, TypeError, ValueError) as error:
        raise _malformed(where, error, FORM) from error
    policy = [i for i, (origin, _) in enumerate(parts) if origin is Origin.POLICY]
    if not messages:
        raise _malformed(where, "a prompt that is none", FORM)
    if not any(parts[i][1] for i in policy):
        raise _malformed(where, "no policy text", FORM)
    prompt = render(Row(file, number, messages, "sft", ()), tokenizer, limit=limit)
    segments = [Segment(Origin.PROMPT, prompt.ids, prompt.text)]
    for index, (origin, text) in enumerate(parts):
        whole = text + end if index == policy[-1] else text
        ids = tuple(encode_within(tokenizer, whole, limit, add_special_tokens=False))
        segments.append(_segment(origin, ids, whole))
    return Trajectory(prompt, segments, group=prompt.uid)


def _segment(origin: Origin, ids: tuple[int, ...], text: str) -> Segment:
    """A segment that no engine sampled: log-probs of 0 where the form asks for some."""
    return Segment(origin, ids, text, (0.0,) * len(ids) if origin is Origin.POLICY else ())
