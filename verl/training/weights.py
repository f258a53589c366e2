"""Writing model folders that Hugging Face and vLLM read: config.json and safetensors."""

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, PretrainedConfig

from verl.errors import ResourceError, explain
from verl.files import atomic_write
from verl.remote_code import trusts_remote_code
from verl.training.fsdp import FsdpModel

SHARD_BYTES = 4 << 30
"""Upper limit of the weights collected in host memory for one file, and so of its size."""

COMPANIONS = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "chat_template*", "additional_chat_templates", "generation_config.json",
)  # fmt: skip
"""Patterns of the files, apart from weights and config, that a usable model folder needs."""


class FileLayout:
    """Assigns tensors to writers and files: the same for all who place them in the same order.

    The files that the writers have in memory at the same time are at most SHARD_BYTES in total, or
    a single tensor each.
    """

    def __init__(self, num_writers: int = 1) -> None:
        self.index: dict[str, str] = {}
        """File name of each tensor."""
        self.num_bytes = 0
        self._totals = [0] * num_writers
        self._files = [(0, 0)] * num_writers  # number and bytes of each writer's current file

    def place(self, name: str, num_bytes: int) -> tuple[int, str]:
        """Assign the next tensor to the writer with the fewest bytes; return writer and file."""
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


def write_weights(
    directory: Path, named: Iterable[tuple[str, Tensor]], config: PretrainedConfig, dtype: str,
    writer: int = 0, num_writers: int = 1,
) -> float:  # fmt: skip
    """Write tensors as `dtype` (float32, bfloat16, float16) with the model's config.

    Several writers may write a new folder together: each iterates over all tensors, in the same
    order, and writes its part; the first also writes index and config. Each file appears whole or
    not at all. A single writer removes stale weight files of a reused directory. Returns the
    seconds spent writing files.
    """
    directory.mkdir(parents=True, exist_ok=True)
    target = getattr(torch, dtype)
    layout, seconds = FileLayout(num_writers), 0.0
    pending: dict[str, Tensor] = {}
    current = ""
    for name, tensor in named:
        owner, file = layout.place(name, tensor.numel() * target.itemsize)
        if owner != writer:
            continue
        if file != current:
            seconds += write_file(directory / current, pending)
            pending, current = {}, file
        pending[name] = tensor.to("cpu", target).contiguous()
    seconds += write_file(directory / current, pending)
    if writer > 0:
        return seconds
    files, index = set(layout.index.values()), directory / "model.safetensors.index.json"
    if len(files) == 1:  # transformers prefers a file of this name to any index
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


def policy_config(model: FsdpModel) -> PretrainedConfig:
    """Return the config of a policy's language model."""
    config = model.module.get_submodule("lm").config
    assert isinstance(config, PretrainedConfig)
    return config


def write_policy(
    model: FsdpModel, directory: Path, dtype: str, writer: int, num_writers: int
) -> float:
    """Write a policy as a Hugging Face folder by the first `num_writers` writers.

    Every rank contributes its shards. Returns and raises as `write_together`.
    """
    named, config = model.policy_weights(dtype), policy_config(model)

    def write() -> float:
        if writer >= num_writers:
            return 0.0
        return write_weights(directory, named, config, dtype, writer, num_writers)

    return write_together(directory, write, named)


def write_together(
    directory: Path, write: Callable[[], float], named: Iterable[tuple[str, Tensor]] = ()
) -> float:
    """Write this rank's part of `directory`; returns the seconds that `write` returns.

    A rank that cannot write raises ResourceError, but only after it has gathered what is left of
    `named` together with the others.
    """
    seconds, problem = 0.0, None
    try:
        seconds = write()
    except OSError as error:
        problem = error
    for _ in named:
        pass
    dist.barrier()
    if problem is not None:
        expected, fix = "a writable folder with space for the weights", "free some space"
        raise ResourceError(explain(str(directory), problem, expected, fix)) from problem
    return seconds


def write_file(path: Path, tensors: dict[str, Tensor]) -> float:
    """Write a safetensors file, unless there are no tensors; return the seconds. Raises OSError."""
    start = time.perf_counter()
    if tensors:
        with atomic_write(path) as part:
            try:
                save_file(tensors, part, metadata={"format": "pt"})
            except SafetensorError as error:  # raised for a full disk, for example
                raise OSError(errno.EIO, str(error), str(path)) from error
    return time.perf_counter() - start


def copy_tokenizer(source: str, directory: Path) -> None:
    """Copy tokenizer, chat template and generation defaults of model `source` to `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    folder = Path(source)
    if not folder.is_dir():
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trusts_remote_code())
        tokenizer.save_pretrained(directory)
        return
    for path in (path for pattern in COMPANIONS for path in folder.glob(pattern)):
        if path.is_dir():
            shutil.copytree(path, directory / path.name, dirs_exist_ok=True)
        else:
            shutil.copy2(path, directory / path.name)
