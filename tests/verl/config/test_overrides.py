"""Names that users bring from Search-R1 and veRL, and `compat=NAME` for several switches."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from pathlib import Path

import pytest

from scripts import option_pages
from tests.verl.config.test_cli import compose
from verl.config import CompatConfig, overrides
from verl.config.algorithm import COMPAT_PRESETS
from verl.config.known import known_options, known_sections, to_argument
from verl.config.overrides import ALIASES, LEGACY, find
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


ASKING = ("8", "0.5", "false", "true", "x")
"""Values as typed; each option below takes one of them that asks for something."""


def values(name: str, *, silent: bool) -> list[str]:
    """Arguments for an option that ask for nothing (`silent`), or for something."""
    quiet = [f'"{v}"' if isinstance(v, str) else to_argument(v) for v in LEGACY[name].silent]
    chosen = quiet if silent else list(ASKING)
    arguments = [f"{name}={value}" for value in chosen]
    parsed = [(one, overrides.parse(one).value()) for one in arguments]
    return [one for one, value in parsed if (value in LEGACY[name].silent) is silent]


@pytest.fixture(autouse=True)
def _warn_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overrides, "_warned", set())


@pytest.mark.parametrize("name", [name for name in LEGACY if name not in known_options()])
def test_a_lost_option_warns_or_is_refused(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """A value that asks for something gets the advice; what asks for nothing is quiet."""
    legacy, asking = LEGACY[name], values(name, silent=False)[0]
    assert overrides.normalise(values(name, silent=True)) == [] == caplog.messages
    if legacy.is_refused:
        with pytest.raises(ConfigError) as caught:
            overrides.normalise([asking])
        message = str(caught.value)
    else:
        assert overrides.normalise([f"+{asking}"]) == []
        (message,) = caplog.messages
    assert name in message and legacy.advice in message


@pytest.mark.parametrize("name", [name for name in LEGACY if name in known_options()])
def test_an_option_that_lost_its_effect_warns(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is still an option, from a preset too, and says what to use when it asks for something."""
    text = known_options()[name].type_name
    value = {"bool": str(True not in LEGACY[name].silent)}.get(text.split(" ")[0], "8")
    with caplog.at_level(logging.WARNING):
        compose(f"{name}={value}")
    assert [LEGACY[name].advice in message for message in caplog.messages] == [True]


@pytest.mark.parametrize(
    ("given", "ours", "value"),
    [
        ("data.shuffle=false", "data.shuffle_train_dataloader", False),
        ("actor_rollout_ref.rollout.n=4", "actor_rollout_ref.rollout.n_agent", 4),
        ("critic.optim.warmup_steps_ratio=0.1", "critic.optim.lr_warmup_steps_ratio", 0.1),
        ("actor_rollout_ref.actor.optim.warmup_steps_ratio=0.1",
         "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio", 0.1),
        ("critic.fsdp_config.param_offload=true", "critic.model.fsdp_config.param_offload", True),
        ("critic.fsdp_config={optimizer_offload: true}",
         "critic.model.fsdp_config.optimizer_offload", True),
        ("trainer.max_actor_ckpt_to_keep=2", "trainer.keep_last", 2),
    ],
)  # fmt: skip
def test_another_name_reaches_its_option(given: str, ours: str, value: object) -> None:
    """What is given under another name is set; every row of the table is among these."""
    found: object = compose(f"+{given}")
    for part in ours.split("."):
        found = getattr(found, part)
    assert found == value


def test_names_agree_with_the_options() -> None:
    """Aliases lead to options or sections; no option is hidden below a name that has no effect."""
    names = {*known_options(), *known_sections()}
    assert set(ALIASES.values()) <= names
    assert not set(ALIASES) & names
    hidden = [key for key in names if find(key) and key not in LEGACY]
    assert hidden == []


def test_what_stands_below_a_name_is_known_too(caplog: pytest.LogCaptureFixture) -> None:
    """Sections that are no options here answer for whatever stands in them."""
    with pytest.raises(ConfigError, match=r"config\.json in the model's folder"):
        compose("+actor_rollout_ref.model.override_config.attention_dropout=0.1")
    compose("actor_rollout_ref.actor.checkpoint.contents=[model]", "critic.fsdp_config.fsdp_size=8")
    assert ["contents" in caplog.messages[0], "over all ranks" in caplog.messages[1]] == [True] * 2


def test_the_page_has_the_tables() -> None:
    """docs/configuration.md holds what the script prints."""
    page = Path(__file__).parents[3] / "docs" / "configuration.md"
    stale = "put there what python -m scripts.option_pages names prints"
    assert option_pages.names() in page.read_text(), stale


def test_values_that_ask_for_nothing_compose_together() -> None:
    """A script that spells out veRL's defaults runs as it stands."""
    quiet = itertools.chain.from_iterable(values(name, silent=True) for name in LEGACY)
    assert compose(*(one for one in quiet if not one.endswith("=null"))).max_turns == 2
