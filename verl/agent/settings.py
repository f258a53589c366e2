"""What a policy's dialogues were trained with, as a file beside its weights.

Inference and evaluation read it, so that a policy is asked as it was trained. An option that
changes what the policy reads, when it stops or how it is scored belongs in `SETTINGS`.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from verl.agent.wording import TEMPLATE_FILE, is_file
from verl.config import Config
from verl.config.option import Limits
from verl.errors import redact
from verl.plugins import absolute

SETTINGS_FILE = "search_r1.json"
"""File in the folder of a model, an adapter or a checkpoint's tokenizer."""
SETTINGS: Mapping[str, str] = {
    "agent.name": "agent",
    "agent.tools": "tools",
    "template": "template",
    "max_turns": "max_turns",
    "do_search": "do_search",
    "retriever.topk": "topk",
    "data.chat_template_kwargs": "chat_template_kwargs",
    "algorithm.no_think_rl": "no_think_rl",
    "data.max_start_length": "max_start_length",
    "data.max_prompt_length": "max_prompt_length",
    "data.max_response_length": "max_response_length",
    "data.max_obs_length": "max_obs_length",
    "reward_model.normalize": "normalize",
}
"""Options of a run that are stored, with their names in the file."""


def get_option(config: Any, key: str) -> Any:
    """Return the value of an option by its dotted key."""
    return attrgetter(key)(config)


def set_option(config: Any, key: str, value: Any) -> None:
    """Set the value of an option by its dotted key."""
    section, _, name = key.rpartition(".")
    setattr(attrgetter(section)(config) if section else config, name, value)


def limits_of(key: str) -> Limits:
    """Return the limits of an option by its dotted key."""
    path, _, name = key.rpartition(".")
    section: Any = attrgetter(path)(Config()) if path else Config()
    field = next(field for field in dataclasses.fields(section) if field.name == name)
    limits: Limits = field.metadata["limits"]
    return limits


class DialogueSettings:
    """The stored settings of a run, with the content of its template's file, read at the start."""

    def __init__(self, config: Config, of_tools: Mapping[str, Any]) -> None:
        """`of_tools`: further settings that the tools want to be stored."""
        values = {name: get_option(config, key) for key, name in SETTINGS.items()}
        values["agent"] = redact(absolute(values["agent"]))
        values["tools"] = [absolute(tool) for tool in values["tools"]]
        self.template: bytes | None = None
        if is_file(config.template):
            self.template = Path(config.template).read_bytes()
            values["template"] = TEMPLATE_FILE
        self.values = {**of_tools, **values}

    def write(self, folder: Path) -> None:
        """Write them into a folder, which is created."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SETTINGS_FILE).write_text(json.dumps(self.values) + "\n")
        if self.template is not None:
            (folder / TEMPLATE_FILE).write_bytes(self.template)


def copy_settings(source: Path, folder: Path) -> bool:
    """Copy the settings of a folder, if it has any; return whether it has."""
    if not (source / SETTINGS_FILE).is_file():
        return False
    for name in (SETTINGS_FILE, TEMPLATE_FILE):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    return True


def settings_of_options(options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield name and value of the settings among a run's nested options, as checkpoints have them.

    Settings that did not exist when the options were written are left out.
    """
    for key, name in SETTINGS.items():
        value: Any = options
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            yield name, value
