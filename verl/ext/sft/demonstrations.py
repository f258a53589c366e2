"""Demonstrations for supervised fine-tuning: rows of dialogues become token sequences with masks.

A row is `{"prompt": [chat messages], "segments": [{"origin": "policy"|"observation", "text": …}]}`,
and may have `"tools": [JSON schemas]`, which the chat template writes into the prompt.
Each segment is tokenised separately, as in a rollout, so that the mask is exact. A row that names
its tokenizer, as `verl.ext.sft.rejection_sampling` writes them, contains the token ids of all
segments including the prompt, and these are used unchanged.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.data.parquet import read_parquet
from verl.data.prompts import Tokenizer, encode_within, render
from verl.data.records import MAX_QUOTE, BadRow, read_jsonl, short_repr
from verl.data.rows import Row, ends_with_answer, parse_prompt
from verl.data.trajectories import TOKENIZER, fingerprint
from verl.data.values import parse_structure
from verl.errors import DataError, explain, shortened
from verl.types import Draw, Origin, Prompt, Segment, Trajectory

ORIGINS = {"policy": Origin.POLICY, "observation": Origin.OBSERVATION}
FORM = '{"prompt": [messages], "segments": [{"origin": "policy"|"observation", "text": str}]}'
EXACT_FORM = (
    '{"tokenizer": str, "segments": [{"origin": …, "text": str, "ids": [int]}]}, prompt first'
)


class _Malformed(ValueError):
    """A problem with a row, described by our own message."""


def load_demonstrations(
    path: str, tokenizer: Tokenizer, max_length: int, end_of_turn: str = ""
) -> list[Trajectory]:
    """Load all rows of a file, with `end_of_turn` after the last policy segment of each.

    Raises DataError for malformed rows and for rows over `max_length` tokens.
    """
    file, own_fingerprint = Path(path), ""
    if not file.is_file():
        raise DataError(
            explain("train_file", path, "a jsonl or parquet file", "give one that exists")
        )
    trajectories = []
    is_parquet = file.suffix.lower() == ".parquet"
    for number, record in read_parquet(path) if is_parquet else read_jsonl(path):
        if isinstance(record, BadRow):
            raise DataError(record.problem)
        location, uid, form = f"{path} row {number}", f"{file.name}#{number}", FORM
        try:
            if not isinstance(record, dict):
                raise _Malformed(type(record).__name__)
            if record.get(TOKENIZER) is not None:
                form = EXACT_FORM
                own_fingerprint = own_fingerprint or fingerprint(tokenizer)
                _check_tokenizer(location, record[TOKENIZER], own_fingerprint)
                trajectory = _exact_row(uid, _segments_of(record), tokenizer, end_of_turn)
            else:
                if "prompt" not in record and "messages" in record:
                    raise _Malformed("messages; their answers are segments")
                row = Row(file.name, number, parse_prompt(record["prompt"]), "sft", ())
                texts = _texts_of(_segments_of(record))
                prompt = _prompt(row, _tools_of(record), tokenizer, max_length)
                trajectory = _text_row(prompt, texts, tokenizer, end_of_turn, max_length)
        except (KeyError, TypeError, ValueError) as error:
            is_ours = isinstance(error, _Malformed)
            got = shortened(error if is_ours else f"{type(error).__name__} {error}", MAX_QUOTE)
            raise DataError(explain(location, got, form, "correct the row")) from error
        if trajectory.num_tokens > max_length:
            fix = "raise max_length or drop the row"
            got, expected = f"{trajectory.num_tokens} tokens", f"at most max_length={max_length}"
            raise DataError(explain(location, got, expected, fix))
        trajectories.append(trajectory)
    if not trajectories:
        raise DataError(explain("train_file", f"{path} without rows", "one or more", "fill it"))
    return trajectories


def _check_tokenizer(location: str, recorded: object, own: str) -> None:
    if recorded != own:
        fix = "set model_path to the model whose run made the rows, or to one with its tokenizer"
        expected = f"{own[:12]}…, the tokenizer of model_path: other tokenizers use other ids"
        raise DataError(
            explain(location, f"ids of tokenizer {short_repr(recorded)}", expected, fix)
        )


def _segments_of(record: Mapping[str, Any]) -> list[Any]:
    """Return the segments, also of a list that was saved as text."""
    parts = record["segments"]
    if isinstance(parts, str):
        parts = parse_structure(parts)
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise _Malformed(f"segments {short_repr(record['segments'])}")
    return parts


def _tools_of(record: Mapping[str, Any]) -> list[Any]:
    """Return the schemas of the tools, also of a list that was saved as text; none without any."""
    tools = record.get("tools") or []
    if isinstance(tools, str):
        tools = parse_structure(tools)
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise _Malformed(f"tools {short_repr(record['tools'])}")
    return tools


def _ids(value: Any) -> tuple[int, ...]:
    """Return token ids; a text of digits or a fraction would be read as other ids."""
    if isinstance(value, str):
        value = parse_structure(value)
    if not isinstance(value, list) or not all(type(id) is int and id >= 0 for id in value):
        raise _Malformed(f"ids {short_repr(value)}")
    return tuple(value)


def _exact_row(uid: str, parts: Any, tokenizer: Tokenizer, end: str) -> Trajectory:
    """Convert a row with token ids; `end` is not added if the policy wrote it itself."""
    origins = {"prompt": Origin.PROMPT, **ORIGINS}
    segments = [
        _segment(origins[part["origin"]], _ids(part["ids"]), part["text"]) for part in parts
    ]
    policy = [i for i, s in enumerate(segments) if s.origin is Origin.POLICY and s.ids]
    if not policy:
        raise _Malformed("no policy ids")
    if not all(isinstance(segment.text, str) for segment in segments):
        raise _Malformed("a text that is not a string")
    if segments[0].origin is not Origin.PROMPT:
        raise _Malformed("no prompt at the start")
    last = segments[policy[-1]]
    closing = tuple(tokenizer.encode(end, add_special_tokens=False)) if end else ()
    if closing and last.ids[-len(closing) :] != closing:
        segments[policy[-1]] = _segment(last.origin, last.ids + closing, last.text + end)
    prompt = Prompt(uid, segments[0].ids, "sft", (), {}, segments[0].text)
    return Trajectory(prompt, segments, draw=Draw(uid))


def _prompt(row: Row, tools: Sequence[Any], tokenizer: Tokenizer, limit: int) -> Prompt:
    """Render the prompt of a row of text, with the tools that its dialogue was shown."""
    if not row.prompt:
        raise _Malformed("no valid prompt")
    if ends_with_answer(row.prompt):
        raise _Malformed("a prompt that ends with the assistant's message, which is a segment")
    prompt = render(row, tokenizer, tools, limit)
    names = [tool["function"]["name"] for tool in tools]
    if any(name not in prompt.text for name in names):
        raise _Malformed(f"tools that the chat template leaves out: {short_repr(names)}")
    return prompt


def _texts_of(parts: Sequence[Mapping[str, Any]]) -> list[tuple[Origin, str]]:
    """Return origin and text of each segment, of which the policy wrote one at least."""
    texts = [(ORIGINS[part["origin"]], part["text"]) for part in parts]
    if not all(isinstance(text, str) for _, text in texts):
        raise _Malformed("a text that is not a string")
    if not any(text for origin, text in texts if origin is Origin.POLICY):
        raise _Malformed("no policy text")
    return texts


def _text_row(
    prompt: Prompt, texts: Sequence[tuple[Origin, str]], tokenizer: Tokenizer, end: str, limit: int
) -> Trajectory:
    """Convert a row of text; `end` is appended to the last policy segment."""
    policy = [i for i, (origin, _) in enumerate(texts) if origin is Origin.POLICY]
    segments = [Segment(Origin.PROMPT, prompt.ids, prompt.text)]
    for index, (origin, text) in enumerate(texts):
        full_text = text + end if index == policy[-1] else text
        ids = tuple(encode_within(tokenizer, full_text, limit, add_special_tokens=False))
        segments.append(_segment(origin, ids, full_text))
    return Trajectory(prompt, segments, draw=Draw(prompt.uid))


def _segment(origin: Origin, ids: tuple[int, ...], text: str) -> Segment:
    """Return a segment that no engine sampled; a policy segment needs log-probs, which are 0."""
    return Segment(origin, ids, text, (0.0,) * len(ids) if origin is Origin.POLICY else ())
