"""Demonstrations in every form that users have: the same trajectory, or a line with the reason."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.core.agent.chat_templates import ChatTokenizer
from tests.core.data.test_data import CountingTokenizer
from tests.fakes import ByteTokenizer
from verl.data.trajectories import TOKENIZER, fingerprint
from verl.errors import DataError
from verl.ext.sft.demonstrations import load_demonstrations
from verl.types import Trajectory

PROMPT = [{"role": "user", "content": "Who's she?"}]
SEGMENTS = [
    {"origin": "policy", "text": "<search>she</search>"},
    {"origin": "observation", "text": "a \"quote\" and 'one'"},
    {"origin": "policy", "text": "<answer>Ada</answer>"},
]
ROW = {"prompt": PROMPT, "segments": SEGMENTS}


class KnownTokenizer(ByteTokenizer):
    """A tokenizer with a vocabulary, which rows with token ids refer to."""

    def get_vocab(self) -> dict[str, int]:
        return {chr(n): n for n in range(256)}


def load(path: Path) -> list[Trajectory]:
    return load_demonstrations(str(path), KnownTokenizer(), 1000)


def exact(ids: Any, text: Any = "Ada") -> dict[str, Any]:
    """Return a row with token ids, whose policy segment has these."""
    segments = [
        {"origin": "prompt", "text": "Who?", "ids": list(b"Who?")},
        {"origin": "policy", "text": text, "ids": ids},
    ]
    return {TOKENIZER: fingerprint(KnownTokenizer()), "segments": segments}


@pytest.mark.parametrize("save", [json.dumps, str, lambda value: str(np.array(value))])
@pytest.mark.parametrize("part", ["prompt", "segments"])
def test_line_31_segments_saved_as_text_are_segments(
    save: Callable[[Any], str], part: str, tmp_path: Path
) -> None:
    """JSON text and what Python and NumPy print give the row that was saved."""
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + json.dumps({**ROW, part: save(ROW[part])}))
    real, saved = load(path)
    assert real.segments == saved.segments and len(real.segments) == 4


def test_parquet_gives_what_jsonl_gives(tmp_path: Path) -> None:
    """A file of veRL's kind, with real lists or with text, and with a gap for the ids."""
    lines, table = tmp_path / "d.jsonl", tmp_path / "d.parquet"
    rows = [ROW, {**ROW, "prompt": "plain"}]
    lines.write_text("\n".join(map(json.dumps, rows)))
    pd.DataFrame([{"segments": row["segments"], "prompt": json.dumps(row["prompt"])}
                  if row is ROW else {**row, "tokenizer": None} for row in rows]
                 ).to_parquet(table)  # fmt: skip
    assert [t.segments for t in load(table)] == [t.segments for t in load(lines)]


@pytest.mark.parametrize("save", [list, json.dumps])
def test_tools_are_written_into_the_prompt(save: Callable[[Any], Any], tmp_path: Path) -> None:
    """By the chat template, whether they are a list or its text; an empty list is none."""
    path, tokenizer = tmp_path / "d.jsonl", ChatTokenizer()
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
    row = {**ROW, "prompt": [{"role": "user", "content": "Who?"}]}
    path.write_text("\n".join(json.dumps(r) for r in ({**row, "tools": save(tools)}, row,
                                                      {**row, "tools": []})))  # fmt: skip
    shown, *plain = load_demonstrations(str(path), tokenizer, 1000)  # type: ignore[arg-type]
    assert '"name": "look_up"' in shown.segments[0].text
    assert plain[0].segments == plain[1].segments
    assert plain[0].segments[0].text == "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("tools", ["look_up", [{"name": "look_up"}], ["look_up"],
                                   [{"function": {"name": "look_up"}}]])  # fmt: skip
def test_tools_that_cannot_be_shown_are_refused(tools: Any, tmp_path: Path) -> None:
    """Other forms than schemas, and schemas that the tokenizer's template leaves out."""
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({**ROW, "tools": tools}))
    with pytest.raises(DataError, match="row 0"):
        load(path)


def test_ids_saved_as_text_are_ids(tmp_path: Path) -> None:
    """The text of a list, and a list."""
    path = tmp_path / "d.jsonl"
    ids = list(b"Ada")
    whole = exact(ids)
    rows = [whole, exact(str(ids)), {**whole, "segments": json.dumps(whole["segments"])}]
    path.write_text("\n".join(map(json.dumps, rows)))
    for trajectory in load(path):
        assert trajectory.segments[1].ids == tuple(ids)


BAD: dict[str, dict[str, Any]] = {
    "digits as ids": exact("123"),
    "a fraction as an id": exact([1.5]),
    "a boolean as an id": exact([True]),
    "a negative id": exact([-1]),
    "ids in objects": exact([{"id": 1}]),
    "no text": exact([1], None),
    "segments cut off": {**ROW, "segments": json.dumps(SEGMENTS)[:-5]},
    "one segment": {**ROW, "segments": SEGMENTS[0]},
    "plain text": {**ROW, "segments": "Ada"},
    "texts": {**ROW, "segments": ["Ada"]},
    "missing": {**ROW, "segments": "nan"},
    "a prompt with its answer": {**ROW, "prompt": [*PROMPT, {"role": "assistant", "content": "x"}]},
    "messages": {"messages": [*PROMPT, {"role": "assistant", "content": "Ada"}]},
    "prompt and response": {"prompt": "Who?", "response": "Ada"},
}


@pytest.mark.parametrize("name", BAD)
def test_other_demonstrations_are_refused(name: str, tmp_path: Path) -> None:
    """In one short line with the form of a row; never trained on as something else."""
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + json.dumps(BAD[name]))
    with pytest.raises(DataError, match="row 1: got ") as refusal:
        load(path)
    message = str(refusal.value)
    assert '"segments": [' in message and "\n" not in message and len(message) < 600


def test_of_a_long_text_only_the_beginning_is_tokenised(tmp_path: Path) -> None:
    """A dialogue over the limit is refused in bounded time, whichever part of it is long."""
    path, tokenizer, text = tmp_path / "d.jsonl", CountingTokenizer(), "q" * 10**6
    answer = [{"origin": "policy", "text": "a"}]
    for row in ({"prompt": text, "segments": answer},
                {"prompt": "Who?", "segments": [{"origin": "policy", "text": text}]}):  # fmt: skip
        path.write_text(json.dumps(row))
        with pytest.raises(DataError, match="max_length=50"):
            load_demonstrations(str(path), tokenizer, 50)
    assert tokenizer.num_chars < 10_000
