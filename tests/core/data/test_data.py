"""Rows, prompts and batches: nothing is silently dropped, duplicated or misread."""

import itertools
import json
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from verl.agent.dialogue import CHARS_PER_TOKEN
from verl.config import Config
from verl.data.prompts import choose, encode_within, load_prompts, render
from verl.data.rows import load_rows
from verl.data.sampler import PromptSampler, num_batches
from verl.errors import ConfigError, DataError


class ByteTokenizer:
    """Token ids are bytes; 256 is the special token before plain text."""

    def __init__(self, chat_template: str | None = None) -> None:
        self.chat_template = chat_template

    def apply_chat_template(
        self, conversation: Sequence[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize and add_generation_prompt
        return "".join(f"[{m['role']}]{m['content']}" for m in conversation) + "[assistant]"

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return ([256] if add_special_tokens else []) + list(text.encode())


def record(question: str = "Who?", target: Any = "Ada", **changes: Any) -> dict[str, Any]:
    """Return a valid row, with parts replaced."""
    row = {
        "data_source": "nq",
        "prompt": [{"role": "user", "content": question}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": target}},
        "extra_info": {"index": 0, "split": "train"},
    }
    return {**row, **changes}


def write_jsonl(path: Path, records: Sequence[Any]) -> str:
    """Write the records as a jsonl file and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return str(path)


def test_parquet_and_jsonl_give_the_same_rows(tmp_path: Path) -> None:
    """The file format changes only the file name in uids."""
    records = [record("a", ["x", "y"]), record("b", ["z"])]
    pd.DataFrame(records).to_parquet(tmp_path / "f.parquet")
    parquet = load_rows(str(tmp_path / "f.parquet"))
    jsonl = load_rows([write_jsonl(tmp_path / "f.jsonl", records)])
    for left, right in zip(parquet, jsonl, strict=True):
        assert (left.prompt, left.ground_truth) == (right.prompt, right.ground_truth)
        assert (left.data_source, left.extra_info) == (right.data_source, right.extra_info)
    assert parquet[0].ground_truth == ("x", "y")
    assert [row.uid for row in parquet] == ["f.parquet#0", "f.parquet#1"]


@pytest.mark.parametrize("truth", ["Ada", ["Ada"], {"target": "Ada"}, {"target": ["Ada"]}], ids=str)
def test_ground_truth_may_be_the_answers_or_a_target(tmp_path: Path, truth: Any) -> None:
    """veRL's builders write plain text, Search-R1's a target; both file formats accept both."""
    records = [record(reward_model={"style": "rule", "ground_truth": truth})]
    pd.DataFrame(records).to_parquet(tmp_path / "f.parquet")
    jsonl = write_jsonl(tmp_path / "f.jsonl", records)
    for row in load_rows([str(tmp_path / "f.parquet"), jsonl]):
        assert row.ground_truth == ("Ada",)


def test_line_11_uids_differ_between_data_sets_with_the_same_index(tmp_path: Path) -> None:
    """Two data sets with the same file name and extra_info.index give different uids."""
    files = [write_jsonl(tmp_path / part / "train.jsonl", [record()] * 3) for part in "ab"]
    uids = [row.uid for row in load_rows(files)]
    assert len(set(uids)) == 6


@pytest.mark.parametrize(
    ("bad", "part"),
    [
        (record(prompt=None), "prompt: got nothing"),
        (record(prompt=[]), "prompt: got []"),
        (record(prompt=[{"role": "user"}]), "prompt: got [{'role': 'user'}]"),
        (record(data_source=None), "data_source: got nothing"),
        (record(target=[]), "reward_model: got"),
        (record(target=[1]), "reward_model: got"),
        (record(target=""), "reward_model: got"),
        (record(reward_model={"style": "rule"}), "reward_model: got"),
        (record(reward_model={"ground_truth": 3}), "reward_model: got"),
        (record(reward_model={"ground_truth": ["Ada", 3]}), "reward_model: got"),
        (record(reward_model={"ground_truth": {}}), "reward_model: got"),
        (record(extra_info=[1]), "extra_info: got [1]"),
        ([1, 2], "got [1, 2], expected an object"),
    ],
)
def test_malformed_row_is_refused_with_its_number(tmp_path: Path, bad: Any, part: str) -> None:
    """The error names the file, row number, part, and what was expected."""
    path = write_jsonl(tmp_path / "t.jsonl", [record(), record(), bad])
    with pytest.raises(DataError) as caught:
        load_rows(path)
    message = str(caught.value)
    assert f"{path}, row 2 (counted from 0)" in message
    assert part in message
    assert "fix:" in message


def test_invalid_json_is_refused_with_its_line_number(tmp_path: Path) -> None:
    """The error for a truncated line names the line."""
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(record()) + '\n{"data_sou\n')
    with pytest.raises(DataError, match=r"row 1 .*correct line 2"):
        load_rows(str(path))


def test_malformed_parquet_row_is_refused_with_its_number(tmp_path: Path) -> None:
    """Row numbers continue across the row groups of a parquet file."""
    records = [record(target=["x"]) for _ in range(50)]
    records[33]["reward_model"]["ground_truth"]["target"] = []
    pd.DataFrame(records).to_parquet(tmp_path / "f.parquet", row_group_size=10)
    with pytest.raises(DataError, match="row 33 "):
        load_rows(str(tmp_path / "f.parquet"))


def test_missing_column_is_refused(tmp_path: Path) -> None:
    """The error for a parquet file names the missing column and those that exist."""
    pd.DataFrame([{"question": "q"}]).to_parquet(tmp_path / "f.parquet")
    with pytest.raises(DataError, match=r"question.*prompt"):
        load_rows(str(tmp_path / "f.parquet"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.parquet", None, "no such file"),
        ("t.csv", "a", r"got \.csv, expected \.parquet or \.jsonl"),
        ("t.jsonl", "\n", "got no rows"),
        ("t.parquet", "not parquet", "expected a parquet file"),
    ],
)
def test_unusable_file_is_refused(
    tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    """The error names the file and the reason."""
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        load_rows(str(tmp_path / name))


def test_file_given_twice_is_refused(tmp_path: Path) -> None:
    """Otherwise two rows would have the same uid."""
    path = write_jsonl(tmp_path / "t.jsonl", [record()])
    with pytest.raises(DataError, match="twice"):
        load_rows([path, path])


def test_render_follows_the_tokenizer(tmp_path: Path) -> None:
    """A chat template gets no extra special tokens; plain text for base models does."""
    chat, plain = load_rows(
        write_jsonl(tmp_path / "t.jsonl", [record("Who?"), record(prompt="Who?")])
    )
    base, instruct = ByteTokenizer(), ByteTokenizer("template")
    assert bytes(render(chat, instruct).ids) == b"[user]Who?[assistant]"
    assert render(chat, base).ids == (256, *b"Who?")
    assert render(plain, base).ids == render(plain, instruct).ids == (256, *b"Who?")
    assert render(chat, base).ground_truth == ("Ada",)


def load(path: object, tokenizer: ByteTokenizer, limit: int) -> list[Any]:
    """Load the prompts of a run with these `data` options."""
    config = Config()
    config.data.max_start_length = limit
    return load_prompts(config, str(path), None, tokenizer)


def test_line_16_overlong_prompts_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Over-long prompts are left out and counted; without others, the run is refused."""
    path = write_jsonl(tmp_path / "t.jsonl", [record("q" * n) for n in (5, 50, 9, 60)])
    tokenizer = ByteTokenizer()
    with caplog.at_level(logging.WARNING):
        kept = load(path, tokenizer, 10)
    assert [prompt.uid for prompt in kept] == ["t.jsonl#0", "t.jsonl#2"]
    assert "2 of 4 prompts over 10 tokens (longest 61)" in caplog.text
    with pytest.raises(DataError, match="4 of 4 prompts"):
        load(path, tokenizer, 2)


class CountingTokenizer(ByteTokenizer):
    """Counts the characters that it encodes."""

    num_chars = 0

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        self.num_chars += len(text)
        return list(text.encode())


@pytest.mark.parametrize("length", [*range(0, 80, 3), 10**6])
def test_only_the_beginning_of_a_long_text_is_tokenised(length: int, tmp_path: Path) -> None:
    """A text within the limit gets all its ids; encoding a longer one costs a bounded time."""
    limit, tokenizer = 2, CountingTokenizer()
    text = "q" * length
    ids = encode_within(tokenizer, text, limit, add_special_tokens=False)
    assert (len(ids) > limit) is (length > limit)
    assert length > limit or ids == list(text.encode())
    assert tokenizer.num_chars <= CHARS_PER_TOKEN * limit
    if length == 10**6:
        rows = tmp_path / "r.jsonl"
        write_jsonl(rows, [record("Who?"), record(text)])
        assert len(load(rows, tokenizer, 50)) == 1
        assert tokenizer.num_chars < 10_000


def test_runs_of_every_seed_have_the_same_rows(tmp_path: Path) -> None:
    """Some of the whole file, in its order, whatever `trainer.seed` is; a large number: all."""
    rows = load_rows(write_jsonl(tmp_path / "t.jsonl", [record(str(n)) for n in range(100)]))
    numbers = [row.number for row in choose(rows, 10)]
    assert numbers == sorted(set(numbers)) and len(numbers) == 10
    assert min(numbers) > 0 and max(numbers) > 50
    assert choose(rows, 1000) == choose(rows, None) == rows
    drawn = []
    for seed in (0, 1):
        config = Config()
        config.trainer.seed = seed
        drawn.append(load_prompts(config, str(tmp_path / "t.jsonl"), 10, ByteTokenizer()))
    assert drawn[0] == drawn[1] and len(drawn[0]) == 10


SIZES = [(7, 3), (8, 4), (5, 5), (5, 4), (10, 7), (64, 24), (3, 1)]


@pytest.mark.parametrize(("num_rows", "batch_size"), SIZES)
@pytest.mark.parametrize("shuffle", [True, False])
def test_sampler_sees_each_row_once_an_epoch(num_rows: int, batch_size: int, shuffle: bool) -> None:
    """Epochs are consecutive permutations, and no batch contains a row twice."""
    sampler = PromptSampler(num_rows, batch_size, shuffle, seed=3)
    batches = [sampler.next_batch() for _ in range(6 * num_rows)]
    assert all(len(set(batch)) == batch_size for batch in batches)
    stream = list(itertools.chain.from_iterable(batches))
    for start in range(0, len(stream) - num_rows + 1, num_rows):
        assert Counter(stream[start : start + num_rows]) == Counter(range(num_rows))


@pytest.mark.parametrize(("num_rows", "batch_size"), SIZES)
def test_sampler_resumes_at_every_step(num_rows: int, batch_size: int) -> None:
    """A sampler restored from its state continues with the same batches (line 21)."""
    sampler = PromptSampler(num_rows, batch_size, seed=5)
    for _ in range(12):
        state = sampler.state_dict()
        resumed = PromptSampler(num_rows, batch_size, seed=5)
        resumed.load_state_dict(json.loads(json.dumps(state)))
        following = [resumed.next_batch() for _ in range(9)]
        branch = PromptSampler(num_rows, batch_size, seed=5)
        branch.load_state_dict(state)
        assert following[0] == branch.next_batch() == sampler.next_batch()
        ahead = PromptSampler(num_rows, batch_size, seed=5)
        ahead.load_state_dict(sampler.state_dict())
        assert following[1:] == [ahead.next_batch() for _ in range(8)]


def test_sampler_order_depends_on_seed_and_epoch() -> None:
    """Seeds and epochs give different orders; without shuffling, rows are in file order."""
    first, same, other = (PromptSampler(50, 50, seed=s) for s in (1, 1, 2))
    batch = first.next_batch()
    assert batch == same.next_batch() != other.next_batch()
    assert batch != first.next_batch()
    ordered = PromptSampler(5, 2, shuffle=False)
    assert [ordered.next_batch() for _ in range(3)] == [[0, 1], [2, 3], [4, 0]]


def test_sampler_refuses_invalid_sizes_and_states() -> None:
    """A batch larger than the data, and a state of other data, raise ConfigError."""
    with pytest.raises(ConfigError, match=r"data\.train_batch_size"):
        PromptSampler(8, 9)
    for rows, size, got in ((9, 4, "8 num_rows"), (7, 4, "8 num_rows"), (8, 3, "4 batch_size"),
                            (8, 5, "4 batch_size")):  # fmt: skip
        with pytest.raises(ConfigError, match=f"resumed data order: got {got}"):
            PromptSampler(8, 4).load_state_dict(PromptSampler(rows, size).state_dict())


def test_num_batches_covers_the_epochs() -> None:
    """Enough batches for every row to be seen in each epoch."""
    assert num_batches(10, 4, 1) == 3
    assert num_batches(10, 4, 2) == 5
