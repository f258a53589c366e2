"""The folder of an evaluation: resumption, damaged files, refused restarts."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from search_r1.evaluation.store import (
    MANIFEST as MANIFEST_FILE,
)
from search_r1.evaluation.store import (
    REQUIRED,
    SAMPLES,
    Store,
    differences,
    read_evaluation,
)
from tests.evaluation.scripted import sample
from tests.full_disk import files_up_to
from verl.errors import ConfigError, DataError, SaveError

MANIFEST: dict[str, Any] = {
    "data": {"num_rows": 2, "files": {"d": "0"}}, "model": {"name": "m", "sha256": "0"},
    "decoding": {"n": 1, "temperature": 0.0, "max_turns": 2, "topk": 3}, "method": "agent",
    "retriever": {"retriever": "bm25"}, "template": {"name": "t"},
}  # fmt: skip


def test_what_was_appended_is_there_after_a_restart(tmp_path: Path) -> None:
    """A resumed evaluation knows the stored samples by key."""
    with Store(tmp_path, MANIFEST) as store:
        store.append(sample("a#0", 1.0))
    with Store(tmp_path, MANIFEST) as store:
        assert store.finished == {("a#0", 0)}
        store.append(sample("a#1"))
    assert [s.uid for s in read_evaluation(tmp_path)[1]] == ["a#0", "a#1"]


@pytest.mark.parametrize("num_bytes", [1, 40, 200])
def test_a_line_cut_short_is_left_out(tmp_path: Path, num_bytes: int) -> None:
    """An incomplete last line is dropped, and the next sample starts a new line."""
    with Store(tmp_path, MANIFEST) as store:
        store.append(sample("a#0", answer="ééé"))
    with (tmp_path / SAMPLES).open("ab") as file:
        file.write(sample("a#1", question="é" * 90).to_json().encode()[:num_bytes])
    with Store(tmp_path, MANIFEST) as store:
        assert store.finished == {("a#0", 0)}
        store.append(sample("a#1"))
    assert [s.uid for s in read_evaluation(tmp_path)[1]] == ["a#0", "a#1"]


def test_odd_text_survives(tmp_path: Path) -> None:
    """Line separators and lone surrogates, which an endpoint may send, are kept."""
    odd = sample("a#0", answer="x\u2028y\x85z\ud800")
    with Store(tmp_path, MANIFEST | {"data": MANIFEST["data"] | {"num_rows": 1}}) as store:
        store.append(odd)
    assert list(read_evaluation(tmp_path)[1]) == [odd]


def test_failed_dialogues_are_played_again(tmp_path: Path) -> None:
    """Failed samples are stored for the report, and run again after a restart."""
    with Store(tmp_path, MANIFEST) as store:
        store.append(sample("a#0", status="failed", error="away"))
        store.append(sample("a#1", 1.0))
    assert read_evaluation(tmp_path)[1][0].error == "away"
    with Store(tmp_path, MANIFEST) as store:
        assert store.finished == {("a#1", 0)}


def test_another_evaluation_is_refused(tmp_path: Path) -> None:
    """A different manifest is refused with the differences, and nothing is changed."""
    with Store(tmp_path, MANIFEST) as store:
        store.append(sample("a#0"))
    before = (tmp_path / SAMPLES).read_bytes()
    other = MANIFEST | {"decoding": {"n": 1, "temperature": 0.7}}
    with pytest.raises(ConfigError, match=r"decoding\.temperature: 0\.0, now 0\.7"):
        Store(tmp_path, other)
    assert (tmp_path / SAMPLES).read_bytes() == before


def test_a_malformed_line_is_named(tmp_path: Path) -> None:
    """A complete line that is not a sample is an error with its number."""
    with Store(tmp_path, MANIFEST) as store:
        store.append(sample("a#0"))
    with (tmp_path / SAMPLES).open("a") as file:
        file.write('{"uid": "a#1"}\n')
    with pytest.raises(DataError, match="line 2"):
        Store(tmp_path, MANIFEST)


def test_an_unfinished_evaluation_is_not_read(tmp_path: Path) -> None:
    """Missing and unfinished evaluations cannot be read."""
    with pytest.raises(DataError, match=MANIFEST_FILE):
        read_evaluation(tmp_path)
    with Store(tmp_path, MANIFEST) as store:
        store.append(sample("a#0"))
    with pytest.raises(DataError, match="got 1 samples, expected 2"):
        read_evaluation(tmp_path)


def test_differences_name_every_leaf() -> None:
    """Added, removed and changed values are listed at any depth."""
    old = {"a": {"b": 1, "c": 2}, "d": 3}
    new = {"a": {"b": 1, "c": 4, "e": 5}}
    assert differences(old, new) == ["a.c: 2, now 4", "a.e: None, now 5", "d: 3, now None"]
    assert differences(old, old) == []


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"data": 3}', "\0", "[" * 100_000])
def test_a_damaged_manifest_is_told(text: str, tmp_path: Path) -> None:
    """Resuming and reading both report a damaged manifest."""
    (tmp_path / MANIFEST_FILE).write_text(text)
    with pytest.raises(DataError, match=MANIFEST_FILE):
        Store(tmp_path, MANIFEST)
    with pytest.raises(DataError, match=MANIFEST_FILE):
        read_evaluation(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [("em", "x"), ("em", math.nan), ("f1", 7), ("cover_em", None), ("turns", "x"), ("uid", [1]),
     ("status", None), ("data_source", 3), ("judge", "x"), ("ground_truth", None)],
)  # fmt: skip
def test_a_sample_of_other_kinds_is_told(field: str, value: object, tmp_path: Path) -> None:
    """A value of a wrong type is an error with the number of its line."""
    with Store(tmp_path, MANIFEST) as store:
        store.append(sample("a#0"))
    line = json.dumps(json.loads(sample("a#1").to_json()) | {field: value})
    with (tmp_path / SAMPLES).open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(DataError, match="line 2: got"):
        read_evaluation(tmp_path)


def test_a_sample_that_is_there_twice_is_not_two(tmp_path: Path) -> None:
    """A repeated line does not count as another sample."""
    with Store(tmp_path, MANIFEST) as store:
        store.append(sample("a#0"))
        store.append(sample("a#0"))
    with pytest.raises(DataError, match=r"got 1 samples .some twice., expected 2"):
        read_evaluation(tmp_path)


@pytest.mark.parametrize(("part", "name", "_"), REQUIRED)
def test_a_manifest_that_lacks_a_part_is_told(
    part: str, name: str, _: type, tmp_path: Path
) -> None:
    """Entries that reports need are checked for presence and type."""
    for value in ({}, {name: None}, {name: [1]}, {name: -1.5}):
        facts = {key: old for key, old in MANIFEST[part].items() if key != name} | value
        (tmp_path / MANIFEST_FILE).write_text(json.dumps(MANIFEST | {part: facts}))
        if (part, name, value) != ("decoding", "temperature", {name: -1.5}):
            with pytest.raises(DataError, match=MANIFEST_FILE):
                read_evaluation(tmp_path)


def test_a_full_disk_keeps_the_samples_before_it(tmp_path: Path) -> None:
    """A full disk is a one-line error, and the stored samples are kept."""
    with Store(tmp_path, MANIFEST) as store:
        store.append(sample("a#0"))
        size = (tmp_path / SAMPLES).stat().st_size
        with files_up_to(size + 20), pytest.raises(SaveError):
            store.append(sample("a#1"))
    with Store(tmp_path, MANIFEST) as store:
        assert store.finished == {("a#0", 0)}
