"""What `--model` and `--adapter` name, decided from names and files alone, without torch."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from search_r1.inference.adapter_folder import adapter_settings
from search_r1.inference.agent_options import AgentOptions
from verl.checkpoint.names import STEP_NAME, is_complete, step_of
from verl.errors import ModelError, explain, first_line

logger = logging.getLogger(__name__)

Options = TypeVar("Options", bound=AgentOptions)

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
           "pytorch_model.bin.index.json")  # fmt: skip
"""Weight files; a complete Hugging Face folder has at least one of them."""


def at_latest_checkpoint(options: Options) -> Options:
    """Point `--model` to the latest checkpoint if it names a run's folder, or its `actor/` folder.

    The original's checkpoints, `actor/global_step_N`, are Hugging Face folders.
    """
    run = Path(options.model)
    if STEP_NAME.fullmatch(run.name) or (run / "config.json").is_file():
        return options
    candidates = [*run.glob("global_step_*"), *run.glob("actor/global_step_*")]
    steps = [step for step in candidates if is_complete(step) or _is_hf_model(step)]
    if not steps:
        return options
    latest = max(steps, key=step_of)
    logger.warning("--model %s is a run's folder: using its latest checkpoint %s", run, latest)
    return replace(options, model=str(latest))


def _is_hf_model(step: Path) -> bool:
    """Whether a folder `global_step_N` is itself a Hugging Face model."""
    is_step = STEP_NAME.fullmatch(step.name) is not None and (step / "config.json").is_file()
    return is_step and any((step / name).is_file() for name in WEIGHTS)


def is_checkpoint(path: Path) -> bool:
    """Whether a path is a folder `global_step_N` that must be exported to run its model."""
    is_step = STEP_NAME.fullmatch(path.name) is not None and path.is_dir()
    return is_step and not _is_hf_model(path)


def check_names(options: AgentOptions) -> None:
    """Refuse a model or an adapter that cannot be one. Raises ModelError."""
    check_name(options.model)
    if not (Path(options.model).is_dir() or try_to_load_from_cache(options.model, "config.json")):
        from verl.hub_access import hub_problem  # noqa: PLC0415 - not for a folder

        if problem := hub_problem():
            raise _no_model(options.model, f"no such folder, and {problem}")
    if options.adapter is not None:
        adapter_settings(Path(options.adapter))


def check_name(name: str) -> None:
    """Refuse a name that is neither a model's folder, a checkpoint, nor a possible hub name."""
    path = Path(name)
    if not path.is_dir():
        try:
            validate_repo_id(name)
        except HFValidationError as error:
            raise not_on_hub(name, error) from error
    elif not is_checkpoint(path) and not (path / "config.json").is_file():
        raise _no_model(name, "a folder without config.json")


def not_on_hub(name: str, error: Exception) -> ModelError:
    """Return the error for a name that the hub refused."""
    got = f"no such folder, and no model on the hub ({first_line(error)[:200]})"
    return _no_model(name, got)


def _no_model(name: str, got: str) -> ModelError:
    fix = "give the folder of a Hugging Face model, a hub name, or a complete global_step_N"
    return ModelError(explain(f"--model {name}", got, "a model", fix))
