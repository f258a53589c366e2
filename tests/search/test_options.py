"""Dataclass options as flags."""

import argparse
from dataclasses import dataclass

import pytest

from search_r1.search.options import add_flags, option, read_flags


@dataclass(frozen=True)
class Sample:
    """A sample of every kind."""

    topk: int = option(3, "documents", at_least=1)
    rate: float = option(0.5, "per second", at_least=0.1)
    path: str | None = option(None, "a file")
    devices: tuple[str, ...] = option((), "where")
    fast: bool = option(False, "a switch")
    derived: int = 7


def read(*flags: str) -> Sample:
    parser = argparse.ArgumentParser()
    add_flags(parser, Sample)
    return read_flags(Sample, parser.parse_args(flags))


def test_without_flags_the_defaults_stand() -> None:
    """The dataclass alone owns the defaults."""
    assert read() == Sample()


def test_every_kind_of_flag_is_read() -> None:
    """Numbers, text, several values and switches arrive with their types."""
    found = read("--topk", "5", "--rate", "2", "--path", "x", "--devices", "a", "b", "--fast")
    assert found == Sample(5, 2.0, "x", ("a", "b"), True)


@pytest.mark.parametrize("flags", [["--topk", "0"], ["--rate", "nan"], ["--topk", "many"]])
def test_values_outside_the_bounds_are_refused(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A bad value ends with status 2 and names the flag and what was got."""
    with pytest.raises(SystemExit, match="2"):
        read(*flags)
    assert flags[0] in capsys.readouterr().err
