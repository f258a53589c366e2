"""How weights reach the ranks: each rank reads the rows of its own shards, and no other.

A checkpoint of safetensors is mapped into memory, which reads nothing; its rows are copied from
there once the model is cut into shards, by all ranks at once and without a collective. Other
checkpoints are loaded whole by each rank of a node, one after another where memory is short.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import torch
from huggingface_hub import snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from verl.machine import HostMemory
from verl.model_files import MAPPED_FILES, indexed_files, is_finite, model_errors, refuse_non_finite
from verl.remote_code import trusts_remote_code
from verl.training.models import load_causal_lm

logger = logging.getLogger(__name__)

WEIGHT_SUFFIXES = (".safetensors", ".bin")
STORED_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Of safetensors, by their names in a file's header."""
FLOAT32_FACTOR = 2
"""Bytes of a model in float32 per byte of its files, which are bfloat16 as a rule."""
MEMORY_SHARE = 0.5
"""Share of the free memory that models may take while they are read all at once."""


class Placeholder(nn.Parameter):
    """A parameter in the dtype it will have, without memory of its own; `source` has its values."""

    source: Tensor

    def __new__(cls, source: Tensor, dtype: torch.dtype, requires_grad: bool) -> Self:
        made = super().__new__(cls, torch.zeros((), dtype=dtype).expand(source.shape))
        made.requires_grad_(requires_grad)
        made.source = source
        return made


def replace_parameters(module: nn.Module, make: Callable[[nn.Parameter], nn.Parameter]) -> None:
    """Put `make(parameter)` in the place of each parameter of `module`; tied ones stay tied."""
    made = {id(old): make(old) for old in module.parameters()}
    for part in module.modules():
        for name, old in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(part, name, made[id(old)])


def blank(parameter: nn.Parameter) -> nn.Parameter:
    """As `parameter`, on the meta device: a shape and a dtype, but no values."""
    nothing = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    return nn.Parameter(nothing, parameter.requires_grad)


def blank_copy(lm: PreTrainedModel) -> PreTrainedModel:
    """A model like `lm` whose parameters have no values; buffers are copied."""
    return copy.deepcopy(lm, {id(parameter): blank(parameter) for parameter in lm.parameters()})


def take_values(module: nn.Module) -> list[Tensor]:
    """Leave `module` without values of its parameters; returns them, in the order of those."""
    values = [p.source if isinstance(p, Placeholder) else p.detach() for p in module.parameters()]
    replace_parameters(module, blank)
    return values


def fill_shards(module: nn.Module, values: list[Tensor], home: torch.device) -> None:
    """Give the shards of a blank `module` memory on `home`, and this rank's rows of `values`: whole
    tensors, or shards placed as the module's own, in the order of the parameters. The list is
    emptied, to free what was read. Raises ModelError for rows that are no finite numbers."""
    values.reverse()
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    faulty: list[str] = []

    def filled(parameter: nn.Parameter) -> nn.Parameter:
        value = values.pop()
        shard = torch.empty_like(parameter, device=home)
        assert isinstance(shard, DTensor), "fill a module that is sharded"
        if isinstance(value, DTensor):
            rows = value.to_local()
        else:  # the rows that FSDP2 keeps on this rank, cut as torch.chunk cuts
            size = -(-len(value) // shard.device_mesh.size())
            rows = value[size * shard.device_mesh.get_local_rank() :][:size]
        # On the device before the cast: 16-bit values travel, not float32 ones.
        shard.to_local().copy_(rows.to(home))
        if not is_finite(shard.to_local()):
            faulty.append(names[id(parameter)])
        return nn.Parameter(shard, parameter.requires_grad)

    with torch.no_grad():
        replace_parameters(module, filled)
    refuse_non_finite(faulty)


@contextlib.contextmanager
def opened_causal_lm(
    path: str, dtype: torch.dtype, num_ranks: int, needs_head: bool = True
) -> Iterator[PreTrainedModel]:
    """The model at `path` in `dtype`, to be given to an engine inside of the `with`. Its weights
    are read when the engine shards it. Raises ModelError as `load_causal_lm` does."""
    lm = map_causal_lm(path, dtype, needs_head)
    if lm is not None:
        yield lm
        return
    logger.info("%s is loaded whole: its files are not safetensors of one dtype, or transformers "
                "computes its tensors from theirs", path)  # fmt: skip
    with loading_turn(path, num_ranks):
        yield load_causal_lm(path, dtype, needs_head)


def map_causal_lm(path: str, dtype: torch.dtype, needs_head: bool) -> PreTrainedModel | None:
    """The model in `dtype`, its weights mapped from the files; None where they must be loaded."""
    with model_errors(path):
        config = AutoConfig.from_pretrained(path, trust_remote_code=trusts_remote_code())
        folder = model_folder(path)
        if folder is None:  # a name that is used for the first time here
            folder = Path(snapshot_download(path, allow_patterns=["*.json", MAPPED_FILES]))
        stored = stored_dtype(folder)
    if stored is None or get_checkpoint_conversion_mapping(config.model_type) is not None:
        return None
    lm = load_causal_lm(path, stored, needs_head)  # copies nothing, since no dtype changes
    if stored is dtype:
        return lm
    if any(buffer.dtype is stored for buffer in lm.buffers()):
        return None  # computed in `stored` rather than `dtype`: another rounding
    lm.config.dtype = dtype
    replace_parameters(lm, lambda p: Placeholder(p.detach(), dtype, p.requires_grad))
    return lm


def stored_dtype(folder: Path) -> torch.dtype | None:
    """The one dtype of all tensors of a folder of safetensors; None of any other folder."""
    found = set()
    for file in folder.glob(MAPPED_FILES):
        with safe_open(file, framework="pt") as tensors:
            found |= {tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
    return STORED_DTYPES.get(found.pop()) if len(found) == 1 else None


def model_folder(path: str) -> Path | None:
    """The folder of a model, its own or the hub's cache; None where it is not known yet."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    try:
        cached = try_to_load_from_cache(path, "config.json")
    except HFValidationError:
        return None  # neither a folder nor a name
    return Path(cached).parent if isinstance(cached, str) else None


def is_cached(path: str) -> bool:
    """Whether a name's files of safetensors are all in the hub's cache, its tokenizer too."""
    folder = model_folder(path)
    if folder is None or not (folder / "tokenizer_config.json").exists():
        return False
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    with model_errors(path, "weights"):
        names = indexed_files(index) if index.exists() else {SAFE_WEIGHTS_NAME}
        return all((folder / name).exists() for name in names)


def weight_bytes(path: str) -> int:
    """Size of a model's weights in its folder or the hub's cache; 0 where it is not known yet."""
    folder = model_folder(path)
    files = folder.iterdir() if folder is not None else ()
    return sum(file.stat().st_size for file in files if file.name.endswith(WEIGHT_SUFFIXES))


@contextlib.contextmanager
def loading_turn(path: str, num_ranks: int) -> Iterator[None]:
    """Have the `num_ranks` of this node load a whole model one after another, where the memory is
    short for all at once, in float32."""
    needed = num_ranks * FLOAT32_FACTOR * weight_bytes(path)
    if needed <= MEMORY_SHARE * HostMemory.now().free:
        yield
        return
    logger.info("models are read one rank after another, for lack of memory to do it at once")
    path = str(Path(tempfile.gettempdir(), f"search-r1-loading-{os.getuid()}.lock"))
    with os.fdopen(os.open(path, os.O_CREAT | os.O_RDWR, 0o600)) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
