"""Writing weights the way Hugging Face and vLLM read them: config.json and safetensors."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, PretrainedConfig

from verl.errors import ConfigError, explain
from verl.files import atomic_write, exclusive_lock
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


class Layout:
    """Which of several writers writes which tensor, and into which file: the same for all who place
    the same tensors in the same order. The files that they hold at once have at most SHARD_BYTES
    together, or a single tensor each.
    """

    def __init__(self, num_writers: int = 1) -> None:
        self.index: dict[str, str] = {}
        """The file of each tensor."""
        self.num_bytes = 0
        self._totals = [0] * num_writers
        self._files = [(0, 0)] * num_writers  # number and bytes of each one's last file

    def place(self, name: str, num_bytes: int) -> tuple[int, str]:
        """The writer of the next tensor, which is the one with the least to write, and its file."""
        num_writers = len(self._files)
        writer = min(range(num_writers), key=self._totals.__getitem__)
        number, size = self._files[writer]
        if size and size + num_bytes > SHARD_BYTES // num_writers:
            number, size = number + 1, 0
        self._files[writer] = number, size + num_bytes
        self._totals[writer] += num_bytes
        self.num_bytes += num_bytes
        self.index[name] = f"model-{number * num_writers + writer + 1:05d}.safetensors"
        return writer, self.index[name]


@contextlib.contextmanager
def whole_folder(out: Path, option: str) -> Iterator[Path]:
    """A folder to write into, which takes the place of `out` when the body has succeeded. Raises
    ConfigError where `out`, which `option` named, holds something else than a model, or another
    process is about to replace it."""
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


def write_weights(
    directory: Path, named: Iterable[tuple[str, Tensor]], config: PretrainedConfig, dtype: str,
    writer: int = 0, num_writers: int = 1,
) -> float:  # fmt: skip
    """Write tensors as `dtype` (float32, bfloat16, float16) with the model's config.

    Several processes may write a new folder together: each is given all tensors, in one order, and
    writes its part; the first writes the rest. Each file appears whole or not at all; one process
    alone removes what else a reused directory holds. Returns the seconds in which it wrote files.
    """
    directory.mkdir(parents=True, exist_ok=True)
    target = getattr(torch, dtype)
    layout, seconds = Layout(num_writers), 0.0
    held: dict[str, Tensor] = {}
    current = ""
    for name, tensor in named:
        owner, file = layout.place(name, tensor.numel() * target.itemsize)
        if owner != writer:
            continue
        if file != current:
            seconds += write_file(directory / current, held)
            held, current = {}, file
        held[name] = tensor.to("cpu", target).contiguous()
    seconds += write_file(directory / current, held)
    if writer > 0:
        return seconds
    files, index = set(layout.index.values()), directory / "model.safetensors.index.json"
    if len(files) == 1:  # beside an index, transformers would take this file alone
        files = {"model.safetensors"}
        os.replace(directory / current, directory / "model.safetensors")
        index.unlink(missing_ok=True)
    else:
        metadata = {"total_size": layout.num_bytes}
        index.write_text(json.dumps({"metadata": metadata, "weight_map": layout.index}))
    if num_writers == 1:
        for stale in directory.glob("model*.safetensors"):
            if stale.name not in files:
                stale.unlink()
    config.dtype = dtype
    config.save_pretrained(directory)
    return seconds


def write_file(path: Path, tensors: dict[str, Tensor]) -> float:
    """The seconds that it takes; nothing is written without tensors. Raises OSError."""
    start = time.perf_counter()
    if tensors:
        with atomic_write(path) as part:
            try:
                save_file(tensors, part, metadata={"format": "pt"})
            except SafetensorError as error:  # also of a full disk
                raise OSError(errno.EIO, str(error), str(path)) from error
    return time.perf_counter() - start


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
