"""From what `--model` names to a folder of weights with a tokenizer, and to a running engine.

An adapter over the model is merged with it into one folder that any engine reads: in float32, then
rounded to the engine's dtype, as an export of training does.
"""

import contextlib
import json
import logging
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from peft import PeftConfig, PeftModel
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

from search_r1.agent.generation import build_dialogue
from search_r1.inference.options import SETTINGS_FILE, AgentOptions
from verl.agent.dialogue import DialogueAgent
from verl.checkpoint.exporting import export
from verl.checkpoint.folders import STEP_NAME, is_complete, step_of
from verl.config import Config
from verl.errors import ConfigError, ModelError, explain, first_line
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
from verl.rollout.interface import RolloutEngine, build_engine
from verl.training.devices import device_type, dtype_name, resolve_dtype
from verl.training.models import load_causal_lm
from verl.training.weights import copy_tokenizer

logger = logging.getLogger(__name__)

Options = TypeVar("Options", bound=AgentOptions)

TEXTS = ("*.json", "*.txt", "*.model", "*.jinja")
"""What is needed of a model on a hub that an endpoint serves."""
FILES = (*TEXTS, "*.safetensors")
"""What is needed of one that is computed here."""
WEIGHTS = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
"""What a Hugging Face folder holds one of, once its weights are written."""


def at_latest_checkpoint(options: Options) -> Options:
    """The options with the last step where `--model` names a run's folder, or its `actor/`.

    A step is a checkpoint of ours, or `actor/global_step_N` as the original writes it: a Hugging
    Face folder.
    """
    run = Path(options.model)
    if STEP_NAME.fullmatch(run.name) or (run / "config.json").is_file():
        return options
    found = [*run.glob("global_step_*"), *run.glob("actor/global_step_*")]
    steps = [step for step in found if is_complete(step) or _has_model(step)]
    if not steps:
        return options
    last = max(steps, key=step_of)
    logger.warning("--model %s is a run: its last step, %s, is taken", run, last)
    return replace(options, model=str(last))


def _has_model(step: Path) -> bool:
    """Whether a folder `global_step_N` is itself a Hugging Face model."""
    is_step = STEP_NAME.fullmatch(step.name) is not None and (step / "config.json").is_file()
    return is_step and any((step / name).is_file() for name in WEIGHTS)


@contextlib.contextmanager
def model_folder(
    name: str, dtype: str, adapter: str | None = None, files: Sequence[str] = FILES
) -> Iterator[Path]:
    """The folder of the model `name` with the adapter's share added, if there is one.

    The model is a folder itself (as the original's checkpoints are), the export of a checkpoint of
    ours, or the `files` that a hub gives. What is written is temporary. Raises ModelError, or
    ConfigError for an unfinished checkpoint.
    """
    path = Path(name)
    with contextlib.ExitStack() as stack:

        def temporary(prefix: str) -> Path:
            return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix))) / "model"

        if STEP_NAME.fullmatch(path.name) and path.is_dir() and not _has_model(path):
            path = export(path, temporary("exported-"), dtype=dtype)
        elif not path.is_dir():
            try:
                path = Path(snapshot_download(name, allow_patterns=list(files)))
            except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
                got = f"no such folder, and no hub ({first_line(error)[:200]})"
                raise _no_model(name, got) from error
        elif not (path / "config.json").is_file():
            raise _no_model(name, "a folder without config.json")
        yield path if adapter is None else merge(path, Path(adapter), temporary("adapted-"), dtype)


def folder_of(options: AgentOptions) -> contextlib.AbstractContextManager[Path]:
    """`model_folder` of these options; of a model that an endpoint serves, without weights."""
    files = TEXTS if options.endpoint else FILES
    return model_folder(options.model, compute_dtype(options), options.adapter, files)


def load_agent(config: Config) -> DialogueAgent:
    """The agent of a run with these options, whose files are whole. Raises ModelError."""
    section, subject = config.actor_rollout_ref, "--model"
    if section.rollout.name == "remote":
        check_template(load_tokenizer(section.model.path, subject), section.model.path, subject)
    else:
        by_transformers = section.rollout.name == "transformers"
        model = check_model(subject, section.model.path, by_transformers=by_transformers)
        names = ("--max-prompt-length", "--max-response-length")
        check_context(model, section.model.path, config.data, *names)
        if not by_transformers and device_type(config.trainer.device) == "cpu":
            # vLLM repacks weights there, and looks at none; other engines are asked afterwards.
            check_finite_files(section.model.path, subject)
    return build_dialogue(config)


def _no_model(name: str, got: str) -> ModelError:
    fix = "give the folder of a Hugging Face model, a hub name, or a complete global_step_N"
    return ModelError(explain(f"--model {name}", got, "a model", fix))


def compute_dtype(options: AgentOptions) -> str:
    """bfloat16, float16 or float32: what the engine on this machine computes in."""
    if options.device == "cuda" and not (options.endpoint or torch.cuda.is_available()):
        raise ConfigError(explain("--device", "cuda", "a GPU that torch sees", "--device cpu"))
    device = torch.device(device_type(options.device))
    return dtype_name(resolve_dtype(options.dtype, device))


@contextlib.asynccontextmanager
async def running_engine(config: Config) -> AsyncIterator[RolloutEngine]:
    """The engine of a training run with these options, ended with the context."""
    engine = build_engine(config)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.shutdown()


CONFIG_FILE = "adapter_config.json"
"""What makes a folder peft's."""


def base_model_of(adapter: Path) -> str:
    """The model that an adapter's folder says it was trained on; empty where it says nothing."""
    return str(_peft_settings(adapter).get("base_model_name_or_path") or "")


def merge(base: Path, adapter: Path, out: Path, dtype: str) -> Path:
    """Write the model of `base` with the adapter's share added, in `dtype`; returns `out`.

    `search_r1.json` comes from the adapter, or else from the base. Raises ModelError for a folder
    that holds no adapter, or one of another model.
    """
    _peft_settings(adapter)
    subject = f"--adapter {adapter}"
    fix = (
        f"give --model the model that it was trained on: {base_model_of(adapter) or 'not recorded'}"
    )
    lm = load_causal_lm(str(base), attention=None)
    with (
        model_errors(str(base), "", subject, f"an adapter that fits {base}", fix),
        quiet_transformers(),
    ):
        settings = PeftConfig.from_pretrained(str(adapter))
        settings.inference_mode = True
        adapted: Any = PeftModel(lm, settings)
        found = adapted.load_adapter(str(adapter), "default")
        for what in ("missing_keys", "unexpected_keys"):
            if getattr(found, what):  # peft only warns, and goes on with random numbers
                raise ModelProblem(f"{what.replace('_', ' ')}: {summarise(getattr(found, what))}")
        whole = adapted.merge_and_unload()
    check_finite(whole.named_parameters(), f"{subject} over {base}")
    whole.to(getattr(torch, dtype)).save_pretrained(out)
    copy_tokenizer(str(base), out)
    written = [folder / SETTINGS_FILE for folder in (adapter, base)]
    for file in [file for file in written if file.is_file()][:1]:
        shutil.copy(file, out / SETTINGS_FILE)
    return out


def _peft_settings(adapter: Path) -> dict[str, Any]:
    """peft's own settings of the folder; raises ModelError where there are none."""
    file = adapter / CONFIG_FILE
    if not file.is_file():
        got = f"a folder without {CONFIG_FILE}" if adapter.is_dir() else "no such folder"
        fix = "give the folder adapter/ that training or `verl.checkpoint export --adapter` wrote"
        raise ModelError(explain(f"--adapter {adapter}", got, "a LoRA adapter of peft", fix))
    with model_errors(str(adapter), CONFIG_FILE, "--adapter", "a LoRA adapter of peft"):
        return dict(json.loads(file.read_text(encoding="utf-8")))
