"""The resolved options of runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from verl.config.known import flattened
from verl.errors import ConfigError, explain, first_line


def read_config(folder: Path) -> dict[str, Any]:
    """A run's `config.yaml`; empty where there is none. Raises ConfigError for one that is none."""
    path = folder / "config.yaml"
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        fix = "restore the file, or delete it"
        raise ConfigError(
            explain(str(path), first_line(error), "what a run writes", fix)
        ) from error
    return found if isinstance(found, dict) else {}


def compared(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each option with every run's value as text (None: the run has no such option)."""
    runs = [dict(flattened(config)) for config in configs]
    names = dict.fromkeys(name for run in runs for name in run)
    return [
        {"name": name, "values": values, "differs": len(set(values)) > 1}
        for name in names
        for values in [[yaml_text(run[name]) if name in run else None for run in runs]]
    ]


def yaml_text(value: Any) -> str:
    """A value in one line, as a command line takes it."""
    text: str = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")
