"""Reading a checkpoint's files, whoever wrote them: nothing in there can act; random states.

What is pickled is read by unpicklers that know the few types which `verl.training.shards` writes; a
file that names another, or is damaged, ends in one line.
"""

from __future__ import annotations

import contextlib
import io
import math
import pickle
import random
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PosixPath
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from verl.errors import ModelError, UserError, explain

METADATA = ".metadata"
"""The file of a distributed checkpoint that says which tensor lies where."""
KNOWN: dict[tuple[str, str], Any] = (
    {
        (kind.__module__, kind.__qualname__): kind
        for kind in (
            *(getattr(metadata, name) for name in metadata.__all__),
            metadata._MEM_FORMAT_ENCODING,
            filesystem._StorageInfo,
            torch.serialization._get_layout,
            torch.Size,
        )
    }
    | {
        ("pathlib", "PosixPath"): PosixPath,
        ("pathlib._local", "PosixPath"): PosixPath,  # as Python 3.13 writes it
    }
    | {
        ("torch", str(dtype).removeprefix("torch.")): dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype)
    }
)
"""What such a file may name."""
_REBUILD = np.empty(0).__reduce__()[0]
NUMPY: list[Any] = [
    *(np.ndarray, np.dtype, np.dtypes.UInt32DType),
    *((_REBUILD, f"numpy.{core}.multiarray._reconstruct") for core in ("_core", "core")),
]
"""Types of NumPy's random state, under the names that NumPy 2 and 1 write."""


@contextlib.contextmanager
def checkpoint_errors(path: Path) -> Iterator[None]:
    """Have whatever goes wrong with a file of a checkpoint end in one line. Raises ModelError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # damaged pickles and archives raise almost any kind
        raise damaged_file(path, error) from error


def damaged_file(path: Path, error: BaseException) -> ModelError:
    """The error of a file that cannot be used."""
    expected = "what a run of this project saved"
    fix = "take another checkpoint: this one is damaged, or of something else"
    return ModelError(explain(f"checkpoint {path}", reason(error), expected, fix))


def reason(error: BaseException) -> str:
    """An error in one line; of several ranks' the first."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = min(error.failures.items())
        return f"rank {rank}: {reason(cause)}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = next((line for line in lines if "GLOBAL" in line), lines[0] if lines else "")
    return f"{type(error).__name__}: {text}"


def read_state_file(path: Path) -> dict[str, Any]:
    """What `torch.save` wrote of numbers, texts, tensors and random states. Raises ModelError."""
    with checkpoint_errors(path), torch.serialization.safe_globals(NUMPY):
        return dict(torch.load(path, map_location="cpu", weights_only=True))


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in KNOWN:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return KNOWN[module, name]


class ShardReader(filesystem.FileSystemReader):
    """Reads tensors, and only those, of a distributed checkpoint; each with its checksum."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Where each tensor lies, of which all is there. Raises ModelError."""
        path = Path(self.path) / METADATA
        with checkpoint_errors(path):
            with path.open("rb") as file:
                found: Metadata = _Unpickler(file).load()
            for key, entry in found.state_dict_metadata.items():
                self._refuse_gaps(key, entry, found.storage_data)
            found.storage_meta = found.storage_meta or metadata.StorageMeta()
            found.storage_meta.load_id = self.load_id
            return found

    def _refuse_gaps(self, key: str, entry: Any, places: Mapping[Any, Any]) -> None:
        """Refuse what is no tensor, for torch unpickles it, and a tensor that is not all there."""
        if not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"{key} is no tensor")
        if sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.size):
            raise ValueError(f"parts of {key} are missing")
        for chunk in entry.chunks:
            place = places[MetadataIndex(key, chunk.offsets)]
            name, end = place.relative_path, place.offset + place.length
            file = Path(self.path) / name
            if Path(name).name != name or not file.is_file() or file.stat().st_size < end:
                raise ValueError(f"{key} needs {end} bytes of the file {name}")

    def _slice_file(self, file: io.IOBase, place: Any) -> IO[bytes]:
        """One tensor's bytes, which their own checksums confirm: torch does not look at these."""
        piece = io.BytesIO(super()._slice_file(file, place).read())
        if zipfile.ZipFile(piece).testzip() is not None:
            raise ValueError(f"{place.relative_path} has other bytes than were written")
        piece.seek(0)
        return piece


def load_tensors(tensors: dict[str, Tensor], shards: Path, alone: bool = False) -> None:
    """Fill tensors in place from a distributed checkpoint, together with all ranks unless `alone`.
    Raises ModelError."""
    try:
        load(tensors, storage_reader=ShardReader(shards), no_dist=alone)
    except CheckpointException as error:  # what a rank found; a lost rank is another error
        raise damaged_file(shards, error) from error


def random_states() -> dict[str, Any]:
    """The states of all random generators of this process."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"python": random.getstate(), "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(), "cuda": cuda}  # fmt: skip


def set_random_states(states: Mapping[str, Any]) -> None:
    """Bring back what `random_states` gave."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
