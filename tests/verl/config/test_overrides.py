"""Option names of Search-R1 and veRL."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path

import pytest

from scripts import option_pages
from tests.verl.config.test_cli import compose
from verl.config import Config, cli, overrides
from verl.config.known import known_options, known_sections, to_argument
from verl.config.overrides import ALIASES, LEGACY, find
from verl.errors import ConfigError


def translated(*arguments: str) -> list[tuple[str, object]]:
    given = map(overrides.parse, arguments)
    return list(overrides.translate_all((one.key_or_group, one.value()) for one in given))


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_compat_asks_for_the_original(plus: str) -> None:
    """Its three switches fell; those that are off, as they were by default, change nothing."""
    assert compose(f"{plus}compat=search_r1").is_as_original
    assert not compose("compat.sampled_validation=false").is_as_original
    for wrong in ("compat=search-r1", "compat=true", "compat.gae_over_all_tokens=true"):
        with pytest.raises(ConfigError, match=r"compat.*search_r1"):
            compose(wrong)


def test_an_old_name_as_an_attribute_is_answered_with_its_name() -> None:
    """A configuration made in Python has current names only."""
    config = Config()
    config.reward_model.correct_answer = 2.0  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"reward_model\.scores\.correct_answer"):
        cli.resolve_config(config)


VALUES = ("8", "0.5", "false", "true", "x")
"""Values of which at least one is not silent for each option without effect."""


def values(name: str, *, silent: bool) -> list[str]:
    """Return arguments for an option whose values are silent, or are not."""
    silent_values = [
        f'"{v}"' if isinstance(v, str) else to_argument(v) for v in LEGACY[name].silent
    ]
    arguments = [f"{name}={value}" for value in (silent_values if silent else VALUES)]
    parsed = [(argument, overrides.parse(argument).value()) for argument in arguments]
    return [argument for argument, value in parsed if (value in LEGACY[name].silent) is silent]


@pytest.fixture(autouse=True)
def _forget_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overrides, "_warned", set())


@pytest.mark.parametrize(("size", "others", "warns"), [
    (1, ["critic.ppo_mini_batch_size=20"], False), (5, [], False),
    (5, ["actor_rollout_ref.actor.ppo_mini_batch_size=20"], True),
])  # fmt: skip
def test_verls_group_size_tells_what_mini_batches_count(
    size: int, others: list[str], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """VeRL's count prompts: a command of its would make `n` times as many updates in silence."""
    given = [f"actor_rollout_ref.rollout.n={size}", *others]
    config = [compose(*given) for _ in range(2)][1]
    assert config.actor_rollout_ref.rollout.n_agent == size
    assert len([m for m in caplog.messages if "ppo_mini_batch_size" in m]) == warns


@pytest.mark.parametrize("name", [name for name in LEGACY if name not in known_options()])
def test_unsupported_options_warn_or_are_refused(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Silent values are accepted without a warning; others are logged or refused with advice."""
    legacy, argument = LEGACY[name], values(name, silent=False)[0]
    assert translated(*values(name, silent=True)) == [] == caplog.messages
    if legacy.is_refused:
        with pytest.raises(ConfigError) as caught:
            translated(argument)
        message = str(caught.value)
    else:
        assert translated(f"+{argument}") == []
        (message,) = caplog.messages
    assert name in message and legacy.advice in message


@pytest.mark.parametrize("name", [name for name in LEGACY if name in known_options()])
def test_an_option_without_effect_warns(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is still an option of `verl.config`; a value that is not silent is logged with advice."""
    type_name = known_options()[name].type_name.split(" ")[0]
    value = str(True not in LEGACY[name].silent) if type_name == "bool" else "8"
    with caplog.at_level(logging.WARNING):
        compose(f"{name}={value}")
    assert [LEGACY[name].advice in message for message in caplog.messages] == [True]


@pytest.mark.parametrize(
    ("given", "name", "value"),
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
def test_an_alias_sets_its_option(given: str, name: str, value: object) -> None:
    """An alias of an option, or of a section, sets the option of `verl.config`."""
    option: object = compose(f"+{given}")
    for part in name.split("."):
        option = getattr(option, part)
    assert option == value


def test_names_agree_with_the_options() -> None:
    """Aliases refer to options or sections; no option is inside a section without effect."""
    names = {*known_options(), *known_sections()}
    targets = set(ALIASES.values())
    assert {overrides.mapping_of(name) or name for name in targets} <= names
    assert not set(ALIASES) & names
    hidden = [key for key in names if find(key) and key not in LEGACY]
    assert hidden == []


def test_options_below_a_name_without_effect_are_known(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The advice of a section applies to everything inside it."""
    with pytest.raises(ConfigError, match=r"config\.json"):
        compose("+actor_rollout_ref.model.override_config.attention_dropout=0.1")
    compose("actor_rollout_ref.actor.checkpoint.contents=[model]", "critic.fsdp_config.fsdp_size=8")
    assert ["contents" in caplog.messages[0], "over all ranks" in caplog.messages[1]] == [True] * 2


def test_the_page_of_configuration_has_the_tables() -> None:
    """The site puts all names in the place of the mark in docs/reference/configuration.md."""
    page = Path(__file__).parents[3] / "docs" / "reference" / "configuration.md"
    assert page.read_text().count(option_pages.MARK) == 1
    named = {name for row in option_pages.LEGACY_OPTIONS for name in row.names.split()}
    assert all(f"`{name}`" in option_pages.names() for name in named)


def test_all_silent_values_compose_together() -> None:
    """A script that spells out veRL's defaults runs unchanged."""
    silent = itertools.chain.from_iterable(values(name, silent=True) for name in LEGACY)
    arguments = [argument for argument in silent if not argument.endswith("=null")]
    assert compose(*arguments).max_turns == 2
