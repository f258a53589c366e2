"""A prompt has the same ids on every day, and the arguments of the template that a run gives."""

from pathlib import Path
from typing import Any

import pytest

from tests.bad_models import whole_model
from verl.config import cli
from verl.errors import ConfigError
from verl.model_files import load_tokenizer

LLAMA = (
    "{% if not date_string is defined %}{% if strftime_now is defined %}"
    "{% set date_string = strftime_now('%d %b %Y') %}{% else %}{% set date_string = '?' %}"
    "{% endif %}{% endif %}Today: {{ date_string }}{{ strftime_now('%j') }}"
    "{% if enable_thinking is defined and not enable_thinking %} no thoughts{% endif %}"
    "{% for m in messages %} {{ m.content }}{% endfor %}"
)


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = whole_model(tmp_path / "model")
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = LLAMA
    tokenizer.save_pretrained(folder)
    return str(folder)


def rendered(tokenizer: Any) -> str:
    return str(tokenizer.apply_chat_template([{"role": "user", "content": "Who?"}], tokenize=False))


def test_line_30_a_template_never_prints_today(model: str) -> None:
    """Whatever form it asks for; by Llama's own fallback where there is no clock."""
    assert rendered(load_tokenizer(model)) == "Today: 26 Jul 2024208 Who?"


def test_arguments_reach_the_template(model: str) -> None:
    """They hold for every renderer of the tokenizer."""
    tokenizer = load_tokenizer(model, template_kwargs={"enable_thinking": False})
    assert " no thoughts" in rendered(tokenizer)


@pytest.mark.parametrize("name", ["thinking", "tools", "strftime_now", "add_generation_prompt"])
def test_arguments_that_have_no_effect_are_refused(model: str, name: str) -> None:
    """One that the template does not read, and those that the run sets."""
    with pytest.raises(ConfigError, match=f"^chat_template_kwargs: got {name},"):
        load_tokenizer(model, template_kwargs={name: True})


def test_the_option_has_the_name_of_verl_too() -> None:
    """A mapping, as the other options are."""
    required = ["data.train_files=a", "data.val_files=b", "actor_rollout_ref.model.path=m"]
    for name in ("chat_template_kwargs", "apply_chat_template_kwargs"):
        config = cli.compose([*required, f"data.{name}={{enable_thinking: false}}"])
        assert config.data.chat_template_kwargs == {"enable_thinking": False}
