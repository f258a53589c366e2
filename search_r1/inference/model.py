"""Resolves `--model` and `--adapter` to a folder with weights and tokenizer; starts the engine."""

import contextlib
import logging
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

from search_r1.agent.generation import build_dialogue
from search_r1.inference.agent_options import AgentOptions
from verl.agent.dialogue import DialogueAgent
from verl.checkpoint.exporting import export
from verl.checkpoint.folders import STEP_NAME, is_complete, step_of
from verl.config import Config
from verl.errors import ConfigError, ModelError, explain, first_line
from verl.model_files import (
    check_context,
    check_finite_files,
    check_model,
    check_template,
    load_tokenizer,
)
from verl.rollout.interface import RolloutEngine, build_engine
from verl.training.devices import device_type, dtype_name, resolve_dtype

logger = logging.getLogger(__name__)

Options = TypeVar("Options", bound=AgentOptions)

TOKENIZER_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
"""Files to download from a hub for a model that an endpoint serves."""
MODEL_FILES = (*TOKENIZER_FILES, "*.safetensors")
"""Files to download from a hub for a model that runs here."""
WEIGHTS = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
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


@contextlib.contextmanager
def model_folder(
    name: str, dtype: str, adapter: str | None = None, files: Sequence[str] = MODEL_FILES
) -> Iterator[Path]:
    """Provide a folder with the model `name`, merged with the adapter if there is one.

    `name` is a model folder (like the original's checkpoints), a checkpoint of this project, which
    is exported, or a hub name, whose `files` are downloaded. Exported and merged models are
    temporary. Raises ModelError, or ConfigError for an incomplete checkpoint.
    """
    path = Path(name)
    with contextlib.ExitStack() as stack:

        def temporary(prefix: str) -> Path:
            return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix))) / "model"

        if STEP_NAME.fullmatch(path.name) and path.is_dir() and not _is_hf_model(path):
            path = export(path, temporary("exported-"), dtype=dtype)
        elif not path.is_dir():
            try:
                path = Path(snapshot_download(name, allow_patterns=list(files)))
            except (HFValidationError, OSError) as error:  # the hub's errors are OSErrors
                got = f"no such folder, and no model on the hub ({first_line(error)[:200]})"
                raise _no_model(name, got) from error
        elif not (path / "config.json").is_file():
            raise _no_model(name, "a folder without config.json")
        if adapter is not None:
            from search_r1.inference.adapter import merge  # noqa: PLC0415 peft, by option

            path = merge(path, Path(adapter), temporary("adapted-"), dtype)
        yield path


def open_model_folder(options: AgentOptions) -> contextlib.AbstractContextManager[Path]:
    """Call `model_folder` for these options; weights are not downloaded for an endpoint's model."""
    files = TOKENIZER_FILES if options.endpoint else MODEL_FILES
    return model_folder(options.model, compute_dtype(options), options.adapter, files)


def checked_agent(config: Config) -> DialogueAgent:
    """Build the agent after checking the model's files. Raises ModelError."""
    section, subject = config.actor_rollout_ref, "--model"
    if section.rollout.name == "remote":
        check_template(load_tokenizer(section.model.path, subject), section.model.path, subject)
    else:
        by_transformers = section.rollout.name == "transformers"
        model = check_model(
            subject, section.model.path, by_transformers=by_transformers, may_be_quantized=True
        )
        names = ("--max-prompt-length", "--max-response-length")
        check_context(model, section.model.path, config.data, *names)
        if not by_transformers and device_type(config.trainer.device) == "cpu":
            # vLLM repacks weights on the CPU, so NaN can only be found in the files; other engines
            # are checked after loading.
            check_finite_files(section.model.path, subject)
    return build_dialogue(config)


def _no_model(name: str, got: str) -> ModelError:
    fix = "give the folder of a Hugging Face model, a hub name, or a complete global_step_N"
    return ModelError(explain(f"--model {name}", got, "a model", fix))


def compute_dtype(options: AgentOptions) -> str:
    """Return the engine's dtype on this machine: bfloat16, float16 or float32."""
    if options.device == "cuda" and not (options.endpoint or torch.cuda.is_available()):
        raise ConfigError(explain("--device", "cuda", "a GPU that torch sees", "--device cpu"))
    device = torch.device(device_type(options.device))
    return dtype_name(resolve_dtype(options.dtype, device))


@contextlib.asynccontextmanager
async def running_engine(config: Config) -> AsyncIterator[RolloutEngine]:
    """Start the rollout engine that these options name; shut it down at the end."""
    engine = build_engine(config)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.shutdown()
