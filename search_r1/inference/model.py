"""Resolves `--model` and `--adapter` to a folder with weights and tokenizer; starts the engine.

An adapter is merged into the model, in one folder that any engine can read: the sum is computed in
float32, then rounded to the engine's dtype, as exports of training runs do.
"""

import contextlib
import logging
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from peft import PeftConfig, PeftModel
from transformers import PretrainedConfig
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

from search_r1.agent.generation import build_dialogue
from search_r1.inference.agent_options import SETTINGS_FILE, AgentOptions
from verl.agent.dialogue import DialogueAgent
from verl.checkpoint.exporting import export
from verl.checkpoint.folders import STEP_NAME, is_complete, step_of
from verl.config import Config
from verl.errors import ConfigError, ModelError, explain, first_line
from verl.json_files import read_object
from verl.model_files import (
    ModelProblem,
    check_context,
    check_finite,
    check_finite_files,
    check_model,
    check_template,
    load_tokenizer,
    model_errors,
    quiet_transformers,
    summarise,
)
from verl.quantization import check_unquantized
from verl.rollout.interface import RolloutEngine, build_engine
from verl.training.devices import device_type, dtype_name, resolve_dtype
from verl.training.models import load_causal_lm
from verl.training.weights import copy_tokenizer

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
        yield path if adapter is None else merge(path, Path(adapter), temporary("adapted-"), dtype)


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


CONFIG_FILE = "adapter_config.json"
"""File that identifies a peft adapter folder."""


def base_model_of(adapter: Path) -> str:
    """Return the base model that an adapter's config names, or '' if it names none."""
    return str(_peft_settings(adapter).get("base_model_name_or_path") or "")


def merge(base: Path, adapter: Path, out: Path, dtype: str) -> Path:
    """Merge the adapter into the base model, write the result in `dtype` to `out`; return `out`.

    `search_r1.json` is copied from the adapter, or else from the base. Raises ModelError if the
    folder has no adapter, or an adapter of another model.
    """
    subject, expected = f"--adapter {adapter}", f"an adapter that fits {base}"
    trained_on = base_model_of(adapter) or "not recorded"
    fix = f"give --model the model that it was trained on: {trained_on}"
    # The sum of a quantized model and an adapter is not what the adapter was trained with.
    check_unquantized("--model", str(base), PretrainedConfig.get_config_dict(base)[0])
    lm = load_causal_lm(str(base), attention=None)
    with model_errors(str(base), "", subject, expected, fix), quiet_transformers():
        settings = PeftConfig.from_pretrained(str(adapter))
        settings.inference_mode = True
        adapted: Any = PeftModel(lm, settings)
        loaded = adapted.load_adapter(str(adapter), "default")
        for kind in ("missing_keys", "unexpected_keys"):
            keys = getattr(loaded, kind)
            if keys:  # peft only warns, and keeps random numbers in place of missing tensors
                raise ModelProblem(f"{kind.replace('_', ' ')}: {summarise(keys)}")
        merged = adapted.merge_and_unload()
    check_finite(merged.named_parameters(), f"{subject} over {base}")
    merged.to(getattr(torch, dtype)).save_pretrained(out)
    copy_tokenizer(str(base), out)
    for folder in (adapter, base):
        if (folder / SETTINGS_FILE).is_file():
            shutil.copy(folder / SETTINGS_FILE, out / SETTINGS_FILE)
            break
    return out


def _peft_settings(adapter: Path) -> dict[str, Any]:
    file = adapter / CONFIG_FILE
    if not file.is_file():
        got = f"a folder without {CONFIG_FILE}" if adapter.is_dir() else "no such folder"
        fix = "give the folder adapter/ that training or `verl.checkpoint export --adapter` wrote"
        raise ModelError(explain(f"--adapter {adapter}", got, "a LoRA adapter of peft", fix))
    with model_errors(str(adapter), CONFIG_FILE, "--adapter", "a LoRA adapter of peft"):
        return read_object(file)
