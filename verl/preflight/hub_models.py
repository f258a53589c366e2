"""Downloads a hub model in two parts: what describes it, which the checks read, and its weights.

The description (config, tokenizer, template) takes a second, so that a wrong model or a machine
that is too small is refused before gigabytes are read. Weights are downloaded once per node, before
ranks start: ranks that wait for a slow download in their first collective would time out.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.utils.tqdm import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)

from verl.config import Config
from verl.model_files import MAPPED_FILES, model_errors
from verl.training.loading import is_cached
from verl.training.roles import has_critic

logger = logging.getLogger(__name__)

DESCRIPTION = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py")
OTHER_WEIGHTS = "pytorch_model*.bin"
SUBFOLDERS = "*/*"
"""Other forms of the same model, such as `original/` and `onnx/`."""
EXPECTED = "a download from the hub"
FIX = "start again: a download goes on where it stopped; or: hf download NAME, HF_HUB_OFFLINE=1"


def is_missing(path: str) -> bool:
    """Whether `path` is a hub name whose files are not all on this machine, but on the hub."""
    return not (constants.HF_HUB_OFFLINE or Path(path).expanduser().exists() or is_cached(path))


def hub_names(config: Config) -> list[str]:
    """Return those models of a run that are names of the hub rather than folders."""
    paths = [config.actor_rollout_ref.model.path]
    if has_critic(config):
        paths.append(config.critic_path)
    return [path for path in dict.fromkeys(paths) if not Path(path).expanduser().exists()]


def fetch_description(name: str, subject: str = "model path") -> Path:
    """Download everything but the weights; return the folder. Raises ModelError."""
    with model_errors(name, "download", subject, EXPECTED, FIX):
        return _download(name, *DESCRIPTION)


def fetch_weights(name: str, subject: str = "model path", shows_bars: bool = True) -> Path:
    """Download a whole model, with bars on a terminal; return the folder. Raises ModelError."""
    with model_errors(name, "download", subject, EXPECTED, FIX), _bars(shows_bars):
        logger.info("%s is downloaded to the hub's cache (%s)", name, constants.HF_HUB_CACHE)
        folder = _download(name, *DESCRIPTION, MAPPED_FILES)
        if not any(folder.glob(MAPPED_FILES)):
            _download(name, OTHER_WEIGHTS)
    return folder


def _download(name: str, *patterns: str) -> Path:
    return Path(snapshot_download(name, allow_patterns=[*patterns], ignore_patterns=SUBFOLDERS))


@contextmanager
def _bars(are_shown: bool) -> Iterator[None]:
    """Show the hub's bars, which transformers disables for good when it is quietened."""
    were_disabled = are_progress_bars_disabled()
    if are_shown and constants.HF_HUB_DISABLE_PROGRESS_BARS is None:
        enable_progress_bars()
    try:
        yield
    finally:
        if were_disabled and constants.HF_HUB_DISABLE_PROGRESS_BARS is None:
            disable_progress_bars()
