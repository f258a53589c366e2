"""`compat=NAME`: one word for several switches, each of which may be set again after it."""

import dataclasses

import pytest

from tests.verl.config.test_cli import compose
from verl.config import CompatConfig
from verl.config.algorithm import COMPAT_PRESETS
from verl.errors import ConfigError

ALL = [field.name for field in dataclasses.fields(CompatConfig)]


def switched_on(*arguments: str) -> list[str]:
    return [name for name, on in dataclasses.asdict(compose(*arguments).compat).items() if on]


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_compat_sets_every_switch(plus: str) -> None:
    """The original's name turns all on; nothing given turns none on."""
    assert switched_on(f"{plus}compat=search_r1") == ALL
    assert switched_on() == []


def test_the_last_word_on_a_switch_wins() -> None:
    """A switch after the name overrides it, one before is overridden, and `none` clears all."""
    rest = [name for name in ALL if name != "sampled_validation"]
    assert switched_on("compat=search_r1", "compat.sampled_validation=false") == rest
    assert switched_on("compat.sampled_validation=false", "compat=search_r1") == ALL
    assert switched_on("compat=search_r1", "compat=none") == []
    assert switched_on("compat.sampled_validation=true") == ["sampled_validation"]


@pytest.mark.parametrize("wrong", ["compat=search-r1", "compat=true", "compat=null"])
def test_an_unknown_name_lists_those_there_are(wrong: str) -> None:
    """The error names every preset and the way to set one switch."""
    with pytest.raises(ConfigError, match=r"one of none, search_r1.*compat\.sampled_validation"):
        compose(wrong)


def test_an_unknown_switch_names_the_nearest() -> None:
    """A misspelt switch is an unknown key like any other."""
    with pytest.raises(ConfigError, match=r"compat\.sampled_validation"):
        compose("compat.sampled_validaton=true")


def test_presets_name_switches_that_exist() -> None:
    """Each preset holds fields of the dataclass only."""
    assert all(names <= set(ALL) for names in COMPAT_PRESETS.values())
