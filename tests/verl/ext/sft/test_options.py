"""The command line of supervised fine-tuning."""

import dataclasses

import pytest

from verl.errors import ConfigError
from verl.ext.sft.options import SCHEDULES, SftConfig, help_text, parse


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("step=3", "steps"),
        ("steps=0", "1 or more"),
        ("steps=x", "steps"),
        ("schedule=no", "linear"),
        ("lora_rank=-1", "from 0 to 512"),
        ("lora_alpha=0", "more than 0"),
    ],
)
def test_bad_options_are_refused(argument: str, message: str) -> None:
    """The error suggests a known key, or describes the allowed values."""
    with pytest.raises(ConfigError, match=message):
        parse(["model_path=m", "train_file=t", "output_dir=o", argument])


def test_home_folder_is_expanded_and_targets_are_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shells do not expand `~` after `key=`; a number is not a name of a layer."""
    monkeypatch.setenv("HOME", "/home/ann")
    arguments = ["model_path=~/m", "train_file=t", "output_dir=o"]
    assert parse(arguments).model_path == "/home/ann/m"
    with pytest.raises(ConfigError, match="target_modules: got 5, expected a text"):
        parse([*arguments, "lora_rank=2", "target_modules=5"])


def test_missing_options_are_named() -> None:
    """The error names a missing option without a default."""
    with pytest.raises(ConfigError, match="model_path"):
        parse(["train_file=x", "output_dir=y"])


def test_help_describes_every_option() -> None:
    """Each option stands there with its default and a description, also those of adapters."""
    lines = help_text().splitlines()
    for field in dataclasses.fields(SftConfig):
        (number,) = [i for i, line in enumerate(lines) if line.startswith(f"  {field.name}=")]
        assert len(lines[number + 1].partition(") ")[2]) > 10, field.name
    assert "  lr=0.0002" in lines and "  train_file=???" in lines


def test_a_schedule_ends_at_its_end() -> None:
    """All begin at the peak; a linear one and a cosine halve it in the middle and end at 0."""
    factors = {name: [f(done) for done in (0.0, 0.5, 1.0)] for name, f in SCHEDULES.items()}
    assert factors["constant"] == [1, 1, 1]
    assert factors["linear"] == pytest.approx([1, 0.5, 0]) == factors["cosine"]
