"""Dataclasses of options as command lines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import pytest

from search_r1.options import Bounds, parse, problems


@dataclass(frozen=True)
class Group:
    """A nested group."""

    group_folder: str = "here"
    """a folder"""


@dataclass(frozen=True)
class Sample:
    """Options of every supported type."""

    topk: Annotated[int, Bounds(1)] = 3
    """documents"""
    rate: Annotated[float, Bounds(gt=0, le=1)] | None = None
    """share"""
    path: str | None = None
    """a file"""
    devices: tuple[str, ...] = ()
    """where"""
    pass_k: tuple[Annotated[int, Bounds(1)], ...] = ()
    """several numbers"""
    is_fast: bool = False
    """a switch"""
    group: Group = field(default_factory=Group)


def read(*flags: str) -> Sample:
    return parse(Sample, flags, prog="sample", description="What it does.")


def test_without_flags_the_defaults_hold() -> None:
    """The defaults are those of the dataclass."""
    assert read() == Sample()


def test_every_type_of_flag_is_read_in_both_spellings() -> None:
    """Numbers, text, lists, boolean flags and groups are parsed to their types."""
    expected = Sample(5, 1.0, "x", ("a", "b"), (1, 2), True, Group("there"))
    assert expected == read("--topk", "5", "--rate", "1", "--path=x", "--devices", "a", "b",
                            "--is-fast", "--pass-k", "1", "2",
                            "--group-folder", "there")  # fmt: skip
    assert expected == read("--topk", "9", "--topk", "5", "--rate=1", "--path", "x", "--devices",
                            "a", "b", "--is_fast", "--pass_k", "1", "2",
                            "--group_folder", "there")  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--topk", "0"], ["--topk", "got 0", "expected 1 or more", "fix:"]),
        (["--rate", "0"], ["--rate", "got 0", "expected more than 0, at most 1"]),
        (["--rate", "nan"], ["--rate", "got nan"]),
        (["--pass-k", "2", "0"], ["--pass-k", "got 0"]),
        (["--topk", "many"], ["--topk", "got 'many'", "expected a whole number"]),
        (["--rate", "much"], ["--rate", "got 'much'", "expected a number"]),
        (["--top", "3"], ["--top", "--topk"]),
        (["more"], ["more"]),
    ],
)
def test_mistakes_are_refused(
    flags: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Errors exit with status 2 and name the flag, the value and the expectation."""
    with pytest.raises(SystemExit, match="2"):
        read(*flags)
    message = capsys.readouterr().err
    assert all(word in message for word in words), message


def test_help_shows_the_docstrings_of_fields(capsys: pytest.CaptureFixture[str]) -> None:
    """--help shows docstrings, defaults and groups, and exits with status 0."""
    with pytest.raises(SystemExit, match="0"):
        read("--help")
    output = capsys.readouterr().out
    for word in ("What it does.", "documents (default: 3)", "--group-folder", "A nested group"):
        assert word in output


def test_problems_are_numbers_out_of_bounds() -> None:
    """Each number out of bounds is a problem, also in nested groups and without a command line."""
    assert list(problems(Sample())) == []
    assert len(list(problems(Sample(topk=0, rate=2.0, pass_k=(0, 1))))) == 3
