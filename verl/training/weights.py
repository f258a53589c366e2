"""Writing weights the way Hugging Face and vLLM read them: config.json and safetensors."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, PretrainedConfig

from verl.errors import ConfigError, explain
from verl.files import whole_file
from verl.locks import exclusive
from verl.remote_code import trusts_remote_code

SHARD_BYTES = 4 << 30
"""Weights held in host memory at once, and so the size of one file."""

COMPANIONS = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "chat_template*", "additional_chat_templates", "generation_config.json",
)  # fmt: skip
"""Files beside the weights that make a folder usable."""
MODEL_FILES = ("config.json", "adapter_config.json")
"""One of these is in each folder that is written here."""


def shards(named: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Group tensors, in order, into dictionaries of at most SHARD_BYTES (or a single tensor)."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in named:
        if shard and size + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard


@contextlib.contextmanager
def whole_folder(out: Path, option: str) -> Iterator[Path]:
    """A folder to write into, which takes the place of `out` when the body has succeeded.

    Raises ConfigError where `out`, which `option` named, holds something else than a model, or
    another process is about to replace it.
    """
    out = out.absolute()
    is_model = any((out / name).is_file() for name in MODEL_FILES)
    if out.exists() and not is_model and (not out.is_dir() or any(out.iterdir())):
        got, fix = f"{out}, which has other content", "name another folder, or delete it"
        raise ConfigError(explain(option, got, "a new folder, or a model's to replace", fix))
    with exclusive(out, option, lock=out.with_name(f".{out.name}.lock")):
        part = out.with_name(out.name + ".tmp")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        yield part
        if out.exists():
            shutil.rmtree(out)
        os.replace(part, out)


def write_weights(
    directory: Path, named: Iterable[tuple[str, Tensor]], config: PretrainedConfig, dtype: str
) -> float:
    """Write tensors as `dtype` (float32, bfloat16, float16) with the model's config.

    Each file appears whole or not at all, and the old files of a reused directory disappear.
    Returns the seconds in which files were written, without those in which tensors came.
    """
    directory.mkdir(parents=True, exist_ok=True)
    target = getattr(torch, dtype)
    index: dict[str, str] = {}
    total, seconds = 0, 0.0
    cast = ((name, tensor.to("cpu", target).contiguous()) for name, tensor in named)
    for number, shard in enumerate(shards(cast)):
        name = f"model-{number + 1:05d}.safetensors"
        start = time.perf_counter()
        with whole_file(directory / name) as part:
            save_file(shard, part, metadata={"format": "pt"})
        seconds += time.perf_counter() - start
        index |= dict.fromkeys(shard, name)
        total += sum(t.nbytes for t in shard.values())
    if len(set(index.values())) == 1:  # beside an index, transformers would take this file alone
        os.replace(directory / name, directory / "model.safetensors")
        index = dict.fromkeys(index, "model.safetensors")
    _write_index(directory, index, total)
    config.dtype = dtype
    config.save_pretrained(directory)
    return seconds


def _write_index(directory: Path, index: dict[str, str], total: int) -> None:
    files = set(index.values())
    for stale in directory.glob("model*.safetensors"):
        if stale.name not in files:
            stale.unlink()
    path = directory / "model.safetensors.index.json"
    if len(files) == 1:
        path.unlink(missing_ok=True)
        return
    path.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": index}))


def copy_tokenizer(source: str, directory: Path) -> None:
    """Bring tokenizer, chat template and generation defaults of model `source` to `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    folder = Path(source)
    if not folder.is_dir():
        AutoTokenizer.from_pretrained(
            source, trust_remote_code=trusts_remote_code()
        ).save_pretrained(directory)
        return
    for path in (path for pattern in COMPANIONS for path in folder.glob(pattern)):
        if path.is_dir():
            shutil.copytree(path, directory / path.name, dirs_exist_ok=True)
        else:
            shutil.copy2(path, directory / path.name)
