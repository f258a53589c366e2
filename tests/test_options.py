"""Dataclasses of options as command lines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import pytest

from search_r1.options import Bounds, parse, problems


@dataclass(frozen=True)
class Group:
    """A group of its own."""

    folder_of_it: str = "here"
    """where"""


@dataclass(frozen=True)
class Sample:
    """A sample of every kind."""

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


def test_without_flags_the_defaults_stand() -> None:
    """The dataclass alone owns the defaults."""
    assert read() == Sample()


def test_every_kind_of_flag_is_read_in_both_spellings() -> None:
    """Numbers, text, several values, switches and groups arrive with their types."""
    found = read("--topk", "5", "--rate", "1", "--path=x", "--devices", "a", "b", "--is-fast",
                 "--pass-k", "1", "2", "--folder-of-it", "there")  # fmt: skip
    assert found == Sample(5, 1.0, "x", ("a", "b"), (1, 2), True, Group("there"))
    assert found == read("--topk", "9", "--topk", "5", "--rate=1", "--path", "x", "--devices", "a",
                         "b", "--is_fast", "--pass_k", "1", "2",
                         "--folder_of_it", "there")  # fmt: skip


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
    """They end with status 2 and name the flag, what was got and what was expected."""
    with pytest.raises(SystemExit, match="2"):
        read(*flags)
    said = capsys.readouterr().err
    assert all(word in said for word in words), said


def test_help_shows_what_the_fields_say(capsys: pytest.CaptureFixture[str]) -> None:
    """Docstrings, defaults and groups, with status 0."""
    with pytest.raises(SystemExit, match="0"):
        read("--help")
    said = capsys.readouterr().out
    for word in ("What it does.", "documents (default: 3)", "--folder-of-it", "A group of its own"):
        assert word in said


def test_problems_are_those_of_bounds() -> None:
    """Each number that is out of them, in nested groups too; a dataclass made in code as well."""
    assert list(problems(Sample())) == []
    assert len(list(problems(Sample(topk=0, rate=2.0, pass_k=(0, 1))))) == 3
