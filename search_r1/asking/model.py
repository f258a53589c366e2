"""From what `--model` names to a folder of weights with a tokenizer, and to a running engine."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from search_r1.asking.adapter import merge
from search_r1.asking.options import AgentOptions
from search_r1.llm_agent.generation import SearchAgent, build_agent
from verl.checkpoint import STEP_NAME, export
from verl.config import Config
from verl.errors import ModelError, explain
from verl.protocol import Engine
from verl.workers.devices import device_type, dtype_name, resolve_dtype
from verl.workers.rollout import RolloutReplica
from verl.workers.rollout.remote_engine import RemoteEngine
from verl.workers.rollout.transformers_engine import TransformersEngine

FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
"""What is needed of a model on a hub."""


@contextlib.contextmanager
def model_folder(name: str, dtype: str, adapter: str | None = None) -> Iterator[Path]:
    """The folder of the model `name` with the adapter's share added, if there is one.

    The model is a folder itself, a checkpoint's export, or what a hub gives. What is written is
    temporary. Raises ModelError, or ConfigError for an unfinished checkpoint.
    """
    with _plain_folder(name, dtype) as base:
        if adapter is None:
            yield base
            return
        with tempfile.TemporaryDirectory(prefix="adapted-") as folder:
            yield merge(base, Path(adapter), Path(folder) / "model", dtype)


@contextlib.contextmanager
def _plain_folder(name: str, dtype: str) -> Iterator[Path]:
    """The folder of the model `name`, without an adapter."""
    path = Path(name)
    if STEP_NAME.fullmatch(path.name) and path.is_dir():
        with tempfile.TemporaryDirectory(prefix="exported-") as folder:
            yield export(path, Path(folder) / "model", dtype=dtype)
    elif path.is_dir():
        if not (path / "config.json").is_file():
            raise _no_model(name, "a folder without config.json")
        yield path
    else:
        try:
            yield Path(snapshot_download(name, allow_patterns=list(FILES)))
        except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            raise _no_model(name, f"no such folder, and no hub ({_first_line(error)})") from error


def load_agent(config: Config) -> SearchAgent:
    """The agent of a training run with these options; raises ModelError without a tokenizer."""
    try:
        return build_agent(config)
    except (OSError, ValueError) as error:
        name = config.actor_rollout_ref.model.path
        raise _no_model(name, f"no tokenizer ({_first_line(error)})") from error


def _no_model(name: str, got: str) -> ModelError:
    fix = "give the folder of a Hugging Face model, a hub name, or a complete global_step_N"
    return ModelError(explain(f"--model {name}", got, "a model", fix))


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200]


def computed_dtype(options: AgentOptions) -> str:
    """bfloat16, float16 or float32: what the engine on this machine computes in."""
    device = torch.device(device_type(options.device))
    return dtype_name(resolve_dtype(options.dtype, device))


@contextlib.asynccontextmanager
async def running_engine(
    options: AgentOptions, config: Config, agent: SearchAgent
) -> AsyncIterator[Engine]:
    """The engine that the options ask for, ended with the context.

    vLLM runs as in training: a `RolloutReplica`, here without Ray.
    """
    folder = config.actor_rollout_ref.model.path
    if options.endpoint:
        served = options.served_model or options.model
        yield RemoteEngine(options.endpoint, served, agent.tokenizer)
    elif options.engine == "transformers":
        device = device_type(options.device)
        yield TransformersEngine.from_folder(folder, device, computed_dtype(options))
    else:
        replica = RolloutReplica(config, lambda _: agent, replica=0)
        await replica.start()
        try:
            yield replica.engine
        finally:
            await replica.shutdown()
