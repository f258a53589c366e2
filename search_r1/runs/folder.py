"""The folder of a run: its options, and where its training trajectories are."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.data.trajectories import HEADER
from verl.errors import ConfigError, explain, first_line
from verl.yaml_files import read_yaml

RUN_FILES = ("config.yaml", "metrics.jsonl", "validation", HEADER)
"""Files by which the folder of a run, or of its trajectories, is recognized."""
SECTIONS = ("agent", "trainer", "reward_model", "data", "retriever", "actor_rollout_ref",
            "actor_rollout_ref.model")  # fmt: skip
TYPES: Mapping[str, type] = {
    "template": str, "agent.tools": list, "trainer.rollout_data_dir": str,
    "reward_model.normalize": str, "actor_rollout_ref.model.path": str,
}  # fmt: skip
"""Options of any run that are read here, and the types that they may have besides null."""


def read_config(folder: Path) -> dict[str, Any]:
    """Return a run's `config.yaml`, or {} if there is none.

    Raises ConfigError if it is damaged, or if an option that is read here has another type.
    """
    path = folder / "config.yaml"
    try:
        config = read_yaml(path)
        if config is None:
            raise ValueError("an empty file")
        if not isinstance(config, dict):
            raise ValueError(f"a {type(config).__name__}, not options with names")
        for name in (*SECTIONS, *TYPES):
            value, kind = _option(config, name), TYPES.get(name, dict)
            if value is not None and not isinstance(value, kind):
                raise ValueError(f"{name}={str(value)[:100]}")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        problem, fix = first_line(error), "restore the file, or delete it"
        raise ConfigError(explain(str(path), problem, "a file that a run wrote", fix)) from error
    return config


def _option(config: Mapping[str, Any], name: str) -> Any:
    """Return an option by its dotted name, or None if it is not set; sections are checked first."""
    value: Any = config
    for part in name.split("."):
        value = (value or {}).get(part)
    return value


def find_rollouts(folder: Path, config: Mapping[str, Any]) -> Path | None:
    """Return the folder of a run's training trajectories, also if the run's folder was moved."""
    if (folder / HEADER).is_file():
        return folder
    named = (config.get("trainer") or {}).get("rollout_data_dir")
    if not named:
        return None
    path = Path(named)
    candidates = (path, folder / path, folder / path.name, folder.parent / path.name)
    return next((c.resolve() for c in candidates if (c / HEADER).is_file()), path.absolute())
