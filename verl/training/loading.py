"""Loading of model weights by the ranks, each of which reads only the rows of its own shards.

Safetensors files are memory-mapped, which reads nothing; once the model is sharded, all ranks copy
their rows from there at the same time and without a collective. Other files are loaded whole by
each rank of a node, one after another where memory is short.
"""

import contextlib
import copy
import fcntl
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import torch
from huggingface_hub import snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from verl.machine import HostMemory
from verl.model_files import (
    MAPPED_FILES,
    check_loading_report,
    indexed_files,
    is_finite,
    model_errors,
    quiet_transformers,
    refuse_non_finite,
)
from verl.remote_code import trusts_remote_code
from verl.training.attention import PACKED
from verl.training.family import check_family, remove_noise

logger = logging.getLogger(__name__)

WEIGHT_SUFFIXES = (".safetensors", ".bin")
STORED_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Dtypes by their names in the header of a safetensors file."""
FLOAT32_FACTOR = 2
"""Bytes of a float32 model per byte of its files, which usually are bfloat16."""
MEMORY_SHARE = 0.5
"""Share of the free memory that models may take if all ranks load at the same time."""


class Placeholder(nn.Parameter):
    """A parameter of the final dtype without memory of its own; its values are in `source`."""

    source: Tensor

    def __new__(cls, source: Tensor, dtype: torch.dtype, requires_grad: bool) -> Self:
        parameter = super().__new__(cls, torch.zeros((), dtype=dtype).expand(source.shape))
        parameter.requires_grad_(requires_grad)
        parameter.source = source
        return parameter


def replace_parameters(module: nn.Module, make: Callable[[nn.Parameter], nn.Parameter]) -> None:
    """Replace each parameter of `module` by `make(parameter)`; tied parameters stay tied."""
    new_parameters = {id(old): make(old) for old in module.parameters()}
    for submodule in module.modules():
        for name, old in list(submodule.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(submodule, name, new_parameters[id(old)])


def meta_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter of the same shape and dtype on the meta device, without values."""
    empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    return nn.Parameter(empty, parameter.requires_grad)


def copy_without_values(lm: PreTrainedModel) -> PreTrainedModel:
    """Copy `lm` with its buffers, but with parameters on the meta device."""
    memo = {id(parameter): meta_parameter(parameter) for parameter in lm.parameters()}
    return copy.deepcopy(lm, memo)


def take_values(module: nn.Module) -> list[Tensor]:
    """Move the parameters of `module` to the meta device; return their values, in order."""
    values = [p.source if isinstance(p, Placeholder) else p.detach() for p in module.parameters()]
    replace_parameters(module, meta_parameter)
    return values


def fill_shards(module: nn.Module, values: list[Tensor], device: torch.device) -> None:
    """Allocate the shards of a sharded meta `module` on `device` and fill in this rank's rows.

    `values` are, in the order of the parameters, whole tensors or tensors sharded like the
    module's. The list is emptied on the way, to free them. Raises ModelError for rows with values
    that are not finite.
    """
    values.reverse()
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    faulty: list[str] = []

    def filled(parameter: nn.Parameter) -> nn.Parameter:
        value = values.pop()
        shard = torch.empty_like(parameter, device=device)
        assert isinstance(shard, DTensor), "the module must be sharded"
        if isinstance(value, DTensor):
            rows = value.to_local()
        else:  # FSDP2 divides rows over ranks as torch.chunk does
            size = -(-len(value) // shard.device_mesh.size())
            rows = value[size * shard.device_mesh.get_local_rank() :][:size]
        # Copy to the device before the cast, to transfer 16-bit rather than float32 values.
        shard.to_local().copy_(rows.to(device))
        if not is_finite(shard.to_local()):
            faulty.append(names[id(parameter)])
        return nn.Parameter(shard, parameter.requires_grad)

    with torch.no_grad():
        replace_parameters(module, filled)
    refuse_non_finite(faulty)


def load_causal_lm(
    path: str, dtype: torch.dtype = torch.float32, needs_head: bool = True,
    attention: str | None = PACKED,
) -> PreTrainedModel:  # fmt: skip
    """Load a causal language model on the CPU; `attention` None means transformers' default.

    Raises ModelError if `path` does not exist, has no such model, or its weights do not match the
    model (`check_loading_report`). Values are checked later, where they are read.
    """
    with model_errors(path, "weights"), quiet_transformers():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=attention, output_loading_info=True,
            ignore_mismatched_sizes=True, trust_remote_code=trusts_remote_code(),
        )  # fmt: skip
        lm: PreTrainedModel = loaded[0]
        check_loading_report(lm, loaded[1], needs_head)
    return remove_noise(lm)


@contextlib.contextmanager
def open_causal_lm(
    path: str, dtype: torch.dtype, num_ranks: int, needs_head: bool = True
) -> Iterator[PreTrainedModel]:
    """Yield the model at `path` in `dtype`; build the FsdpModel within the `with` block.

    Its weights are read when they are sharded. Raises ModelError as `load_causal_lm` does.
    """
    lm = map_causal_lm(path, dtype, needs_head)
    if lm is not None:
        yield lm
        return
    logger.info("%s is loaded whole by each rank: its files are not safetensors of one dtype, or "
                "transformers converts their tensors", path)  # fmt: skip
    with loading_turn(path, num_ranks):
        yield load_causal_lm(path, dtype, needs_head)


def map_causal_lm(path: str, dtype: torch.dtype, needs_head: bool) -> PreTrainedModel | None:
    """Return the model in `dtype` with memory-mapped weights; None where they must be loaded."""
    with model_errors(path):
        config = AutoConfig.from_pretrained(path, trust_remote_code=trusts_remote_code())
        folder = Path(path).expanduser()
        if not folder.is_dir():  # a hub model, of which the cache may have config.json only
            check_family(config, path)
            folder = Path(snapshot_download(path, allow_patterns=["*.json", MAPPED_FILES]))
        stored = stored_dtype(folder)
    if stored is None or get_checkpoint_conversion_mapping(config.model_type) is not None:
        return None
    lm = load_causal_lm(path, stored, needs_head)  # copies nothing: the dtype is unchanged
    if stored is dtype:
        return lm
    if any(buffer.dtype is stored for buffer in lm.buffers()):
        return None  # such buffers were computed in `stored`, which rounds differently
    lm.config.dtype = dtype
    replace_parameters(lm, lambda p: Placeholder(p.detach(), dtype, p.requires_grad))
    return lm


def stored_dtype(folder: Path) -> torch.dtype | None:
    """Return the dtype of all tensors in a folder's safetensors files; None if they differ."""
    dtypes = set()
    for file in folder.glob(MAPPED_FILES):
        with safe_open(file, framework="pt") as tensors:
            dtypes |= {tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
    return STORED_DTYPES.get(dtypes.pop()) if len(dtypes) == 1 else None


def model_folder(path: str) -> Path | None:
    """Return a model's folder, local or in the hub's cache; None if it is not downloaded yet."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    try:
        cached = try_to_load_from_cache(path, "config.json")
    except HFValidationError:
        return None  # neither a folder nor a valid hub name
    return Path(cached).parent if isinstance(cached, str) else None


def is_cached(path: str) -> bool:
    """Return whether a model's safetensors files and tokenizer are all on this machine."""
    folder = model_folder(path)
    if folder is None or not (folder / "tokenizer_config.json").exists():
        return False
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    with model_errors(path, "weights"):
        names = indexed_files(index) if index.exists() else {SAFE_WEIGHTS_NAME}
        return all((folder / name).exists() for name in names)


def weight_bytes(path: str) -> int:
    """Return the size of a model's weight files; 0 if it is not downloaded yet."""
    folder = model_folder(path)
    files = folder.iterdir() if folder is not None else ()
    return sum(file.stat().st_size for file in files if file.name.endswith(WEIGHT_SUFFIXES))


@contextlib.contextmanager
def loading_turn(path: str, num_ranks: int) -> Iterator[None]:
    """Let the ranks of this node load a whole model in turn, if memory is short for all at once."""
    needed = num_ranks * FLOAT32_FACTOR * weight_bytes(path)
    if needed <= MEMORY_SHARE * HostMemory.now().free:
        yield
        return
    logger.info("ranks load the model one after another: memory is short for all at once")
    lock_path = str(Path(tempfile.gettempdir(), f"search-r1-loading-{os.getuid()}.lock"))
    with os.fdopen(os.open(lock_path, os.O_CREAT | os.O_RDWR, 0o600)) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
