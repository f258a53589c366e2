"""Resolves `--model` and `--adapter` to a folder with weights and tokenizer; starts the engine."""

import contextlib
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import torch
from huggingface_hub import snapshot_download

from search_r1.inference.agent_options import AgentOptions
from search_r1.inference.ending import ending_processes
from search_r1.inference.model_name import check_name, is_checkpoint, not_on_hub
from search_r1.phases import phase
from verl.agent.wording import TEMPLATE_FILE
from verl.checkpoint.exporting import export
from verl.config import Config
from verl.engine import RolloutEngine
from verl.errors import ConfigError, explain
from verl.rollout.interface import build_engine
from verl.training.devices import device_type, dtype_name, resolve_dtype

TOKENIZER_FILES = ("*.json", "*.txt", "*.model", "*.jinja", TEMPLATE_FILE)
"""Files to download from a hub for a model that an endpoint serves."""
MODEL_FILES = (*TOKENIZER_FILES, "*.safetensors")
"""Files to download from a hub for a model that runs here."""


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
    check_name(name)
    with contextlib.ExitStack() as stack:

        def temporary(prefix: str) -> Path:
            return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix))) / "model"

        if is_checkpoint(path):
            path = export(path, temporary("exported-"), dtype=dtype)
        elif not path.is_dir():
            try:
                path = Path(snapshot_download(name, allow_patterns=list(files)))
            except OSError as error:  # the base class of the hub's errors
                raise not_on_hub(name, error) from error
        if adapter is not None:
            from search_r1.inference.adapter import merge  # noqa: PLC0415 peft, by option

            path = merge(path, Path(adapter), temporary("adapted-"), dtype)
        yield path


def open_model_folder(options: AgentOptions) -> contextlib.AbstractContextManager[Path]:
    """Call `model_folder` for these options; weights are not downloaded for an endpoint's model."""
    files = TOKENIZER_FILES if options.endpoint else MODEL_FILES
    return model_folder(options.model, compute_dtype(options), options.adapter, files)


def compute_dtype(options: AgentOptions) -> str:
    """Return the engine's dtype on this machine: bfloat16, float16 or float32."""
    if options.device == "cuda" and not (options.endpoint or torch.cuda.is_available()):
        raise ConfigError(explain("--device", "cuda", "a GPU that torch sees", "--device cpu"))
    device = torch.device(device_type(options.device))
    return dtype_name(resolve_dtype(options.dtype, device))


@contextlib.asynccontextmanager
async def running_engine(config: Config) -> AsyncIterator[RolloutEngine]:
    """Start the rollout engine that these options name; shut it down at the end.

    Its processes end with this one, even at SIGKILL.
    """
    with ending_processes() as starting:
        engine = build_engine(config)
        with starting, phase(f"starting the engine {config.actor_rollout_ref.rollout.name}"):
            await engine.start()
        try:
            yield engine
        finally:
            await engine.shutdown()
