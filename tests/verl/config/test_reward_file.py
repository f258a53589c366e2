"""veRL's names for a user's reward become `reward_model.name`."""

from pathlib import Path

import pytest

from tests.verl.config.test_cli import REQUIRED
from verl.config import Config, cli
from verl.errors import ConfigError

KEY = "custom_reward_function"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((f"{KEY}.path=own/a.py",), "own/a.py:compute_score"),
        ((f"{KEY}.path=own/a.py", f"{KEY}.name=mine"), "own/a.py:mine"),
        ((f"{KEY}.name=mine", f"+{KEY}.path=own/a.py"), "own/a.py:mine"),
        ((f"{KEY}.path=b.py", f"{KEY}.path='own dir/it\\'s.py'"), "own dir/it's.py:compute_score"),
        ((f"reward.{KEY}.path=a.py", f"reward.{KEY}.name=f"), "a.py:f"),
        ((f"{KEY}.path=a.py", "reward_model.name=a.py:compute_score"), "a.py:compute_score"),
        ((f"{KEY}.path=null", f"{KEY}.name=compute_score"), "em"),
        ((f"{KEY}.name=compute_score", f"{KEY}.reward_kwargs={{}}"), "em"),
    ],
)
def test_file_and_function_make_one_name(arguments: tuple[str, ...], expected: str) -> None:
    """On the command line, from Python, with and without a function; the last value wins."""
    assert cli.compose([*REQUIRED, *arguments]).reward_model.name == expected
    resolved = cli.resolve_config(Config(), [*REQUIRED, *arguments])
    assert resolved.reward_model.name == expected


def test_a_preset_of_verl_names_its_reward(tmp_path: Path) -> None:
    """The section of veRL's own YAML file is read as well."""
    preset = tmp_path / "mine.yaml"
    preset.write_text(f"{KEY}:\n  path: own/a.py\n  name: mine\n")
    words = ["--config-dir", str(tmp_path), "--config-name", "mine", *REQUIRED]
    assert cli.compose(words).reward_model.name == "own/a.py:mine"
    preset.write_text(f"{KEY}:\n  path: null\n  name: compute_score\n")
    assert cli.compose(words).reward_model.name == "em"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((f"{KEY}.path=a.py", "reward_model.name=f1"), "reward_model.name=f1 as well"),
        ((f"{KEY}.path=a.py", f"{KEY}.reward_kwargs={{x: 1}}"), "defaults of the function"),
        ((f"{KEY}.path=a.py", f"{KEY}.reward_kwargs.x=1"), "defaults of the function"),
        ((f"{KEY}.path=[a.py]",), "expected a file"),
        ((f"{KEY}.path=a.py", f"{KEY}.name=''"), "expected the name of a function"),
        ((f"{KEY}.file=a.py",), f"{KEY}.path"),
    ],
)
def test_what_cannot_be_one_reward_is_refused(arguments: tuple[str, ...], problem: str) -> None:
    """A second reward, arguments that would be lost, and unknown names."""
    with pytest.raises(ConfigError) as refused:
        cli.compose([*REQUIRED, *arguments])
    assert problem in str(refused.value)
