"""Exports a checkpoint as a Hugging Face folder; needs neither ranks nor devices."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoConfig

from verl.agent.settings import SETTINGS_FILE, copy_settings, settings_of_options
from verl.checkpoint.folders import (
    EXPECTED,
    STATE_FILE,
    TOKENIZER_FOLDER,
    is_complete,
    read_state,
)
from verl.config.policy import EXPORTED
from verl.errors import ConfigError, explain
from verl.files import exclusive_lock
from verl.model_files import check_weights, is_finite, model_errors, refuse_non_finite
from verl.plugins import imported
from verl.quantization import check_unquantized
from verl.remote_code import trusts_remote_code
from verl.training.checkpoint_files import ShardReader, checkpoint_errors, load_tensors
from verl.training.devices import DTYPES
from verl.training.loading import load_causal_lm
from verl.training.shards import RECORDS_FILE, read_records
from verl.training.weights import SHARD_BYTES, copy_tokenizer, write_weights

MODEL_FILES = ("config.json", "adapter_config.json")
"""Files by which a model folder is recognised: each folder written here has one of them."""


@contextlib.contextmanager
def whole_folder(out: Path, option: str) -> Iterator[Path]:
    """Yield a folder to write into, which replaces `out` when the body has succeeded.

    Raises ConfigError, for the option `option` that named `out`, if `out` has content other than a
    model, or another process is writing it.
    """
    out = out.absolute()
    is_model = any((out / name).is_file() for name in MODEL_FILES)
    if out.exists() and not is_model and (not out.is_dir() or any(out.iterdir())):
        got, fix = f"{out}, which has other content", "name another folder, or delete it"
        raise ConfigError(explain(option, got, "a new folder, or a model's to replace", fix))
    with exclusive_lock(out, option, lock=out.with_name(f".{out.name}.lock")):
        part = out.with_name(out.name + ".tmp")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        yield part
        if out.exists():
            shutil.rmtree(out)
        os.replace(part, out)


def export(
    step_dir: Path, out: Path, base: str | None = None, dtype: str = EXPORTED,
    adapter_only: bool = False,
) -> Path:  # fmt: skip
    """Write the policy of a checkpoint as a Hugging Face folder with tokenizer; returns `out`.

    `base` names a model whose config and tokenizer to use instead of the checkpoint's, and whose
    weights an adapter is merged into. With `adapter_only`, writes the adapter as a peft folder.
    Raises ConfigError if `step_dir` is not complete, if it holds no adapter with `adapter_only`, or
    if `base` is not the adapter's base model.
    """
    if not is_complete(step_dir):
        fix = "give a complete checkpoint; an interrupted one cannot be used"
        raise ConfigError(explain("checkpoint", step_dir, EXPECTED, fix))
    record = read_records(step_dir).get("actor")
    if adapter_only and record is None:
        expected = "a checkpoint of a run with lora_rank above 0"
        fix = "leave --adapter out: all weights were trained"
        raise ConfigError(explain("--adapter", step_dir, expected, fix))
    with whole_folder(out, "--out") as part:
        if adapter_only and record is not None:
            adapter = _read_adapter(step_dir, record, base)
            adapter.write(part)
            write_base = imported("verl.ext.lora.base:write_base")
            write_base(part, str(adapter.config.base_model_name_or_path))
        else:
            _write_model(step_dir, part, record, base, dtype)
        _write_settings(step_dir, part)
    return out


def _write_settings(step_dir: Path, out: Path) -> None:
    """Write what the dialogues of the run were; of an older checkpoint, what its options say."""
    is_told = copy_settings(step_dir / TOKENIZER_FOLDER, out)
    if not is_told and (step_dir / STATE_FILE).is_file():
        settings = dict(settings_of_options(read_state(step_dir).get("config", {})))
        if settings:
            (out / SETTINGS_FILE).write_text(json.dumps(settings) + "\n")


def _write_model(
    step_dir: Path, out: Path, record: Mapping[str, Any] | None, base: str | None, dtype: str
) -> None:
    """Write the whole policy: its trained weights, or its base model with the adapter merged."""
    source = base or str(step_dir / TOKENIZER_FOLDER)
    with model_errors(source, "config.json"):
        config = AutoConfig.from_pretrained(source, trust_remote_code=trusts_remote_code())
    check_unquantized("--base" if base else "checkpoint", source, config.to_dict())
    weights = _read_policy(step_dir / "shards")
    if record is not None:
        adapter = _read_adapter(step_dir, record, base)
        lm = load_causal_lm(str(adapter.config.base_model_name_or_path))
        weights = adapter.merge((name, p.detach()) for name, p in lm.named_parameters())
    non_finite: list[str] = []

    def converted() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            tensor = tensor.to(DTYPES[dtype])
            if not is_finite(tensor):
                non_finite.append(name)
            yield name, tensor

    write_weights(out, converted(), config, dtype)
    refuse_non_finite(non_finite, f"weights of {step_dir} in {dtype}")
    copy_tokenizer(source, out)
    check_weights(str(out), config, True, True, f"policy of {step_dir}")


def _read_adapter(step_dir: Path, record: Mapping[str, Any], base: str | None) -> Any:
    """Read the policy's adapter; `base` is its base model's current path, if it has moved."""
    parameters = dict(_read_policy(step_dir / "shards"))
    with checkpoint_errors(step_dir / RECORDS_FILE):
        return imported("verl.ext.lora.adapter:adapter_of_record")(record, base, parameters)


def _read_policy(shards: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the whole tensor of each of the policy's weights, a few GiB at a time."""
    prefix = "actor.model.lm."
    entries = ShardReader(shards).read_metadata().state_dict_metadata
    waiting = [key for key in entries if key.startswith(prefix)]
    while waiting:
        group: dict[str, Tensor] = {}
        while waiting and sum(t.nbytes for t in group.values()) <= SHARD_BYTES:
            entry = entries[waiting[0]]
            assert isinstance(entry, TensorStorageMetadata), "ShardReader refuses other entries"
            group[waiting.pop(0)] = torch.empty(entry.size, dtype=entry.properties.dtype)
        load_tensors(group, shards, alone=True)
        yield from ((key.removeprefix(prefix), tensor) for key, tensor in group.items())
