"""Safe reading of checkpoint files from untrusted sources, and random states.

Pickles are read by unpicklers that allow only the few types that `verl.training.shards` writes, so
that no code in a file can run. A damaged file, or one with another type, raises a ModelError.
"""

import contextlib
import json
import pickle
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PosixPath
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from verl.errors import ModelError, UserError, explain
from verl.training.devices import dtype_name

DRIVER_FILE = "ranks/driver.pt"
"""File of a checkpoint with the driver's random states."""
Parsed = TypeVar("Parsed")
METADATA = ".metadata"
"""File of a distributed checkpoint that lists the location of each tensor."""
_METADATA: list[Any] = [
    *(getattr(metadata, name) for name in metadata.__all__),
    *(metadata._MEM_FORMAT_ENCODING, filesystem._StorageInfo),
    *(torch.serialization._get_layout, torch.Size),
]
_DTYPES = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]
ALLOWED: dict[tuple[str, str], Any] = {
    **{(kind.__module__, kind.__qualname__): kind for kind in _METADATA},
    **{("torch", dtype_name(dtype)): dtype for dtype in _DTYPES},
    ("pathlib", "PosixPath"): PosixPath,
    ("pathlib._local", "PosixPath"): PosixPath,  # as Python 3.13 writes it
}
"""Types and functions that the metadata pickle may contain, by module and name."""
_REBUILD = np.empty(0).__reduce__()[0]
NUMPY: list[Any] = [
    *(np.ndarray, np.dtype, np.dtypes.UInt32DType),
    *((_REBUILD, f"numpy.{core}.multiarray._reconstruct") for core in ("_core", "core")),
]
"""Types in NumPy's random state, by the names that NumPy 2 and 1 write."""


@contextlib.contextmanager
def checkpoint_errors(path: Path) -> Iterator[None]:
    """Raise ModelError, with a one-line message, for any error while reading the file `path`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # damaged pickles and archives raise almost any kind
        raise damaged_file(path, error) from error


def damaged_file(path: Path, error: BaseException) -> ModelError:
    """Build the error for a file that cannot be used."""
    expected = "a file saved by a run of this project"
    fix = "take another checkpoint: this one is damaged, or of something else"
    return ModelError(explain(f"checkpoint {path}", one_line(error), expected, fix))


def one_line(error: BaseException) -> str:
    """Describe an error in one line; for errors of several ranks, that of the first rank."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = min(error.failures.items())
        return f"rank {rank}: {one_line(cause)}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # torch's unpickler names a forbidden type in a line with "GLOBAL", which is not the first.
    text = next((line for line in lines if "GLOBAL" in line), lines[0] if lines else "")
    return f"{type(error).__name__}: {text}"


def read_json(path: Path, parse: Callable[[Any], Parsed]) -> Parsed:
    """Return what `parse` makes of a JSON file. Raises ModelError, also for an error of `parse`."""
    with checkpoint_errors(path):
        return parse(json.loads(path.read_text()))


def read_state_file(path: Path) -> dict[str, Any]:
    """Read a `torch.save` file of plain values, tensors and random states. Raises ModelError."""
    with checkpoint_errors(path), torch.serialization.safe_globals(NUMPY):
        return dict(torch.load(path, map_location="cpu", weights_only=True))


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it contains {module}.{name}")
        return ALLOWED[module, name]


class ShardReader(filesystem.FileSystemReader):
    """Reads a distributed checkpoint of tensors only: torch would unpickle any other object."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the location of each tensor. Raises ModelError."""
        path = Path(self.path) / METADATA
        with checkpoint_errors(path):
            with path.open("rb") as file:
                contents: Metadata = _Unpickler(file).load()
            for key, entry in contents.state_dict_metadata.items():
                if not isinstance(entry, TensorStorageMetadata):
                    raise ValueError(f"{key} is no tensor")
            contents.storage_meta = contents.storage_meta or metadata.StorageMeta()
            contents.storage_meta.load_id = self.load_id
            return contents


def load_tensors(tensors: dict[str, Tensor], shards: Path, alone: bool = False) -> None:
    """Fill tensors in place from a checkpoint, with all ranks unless `alone`. Raises ModelError."""
    try:
        load(tensors, storage_reader=ShardReader(shards), no_dist=alone)
    except CheckpointException as error:  # an error while reading; losing a rank raises another
        raise damaged_file(shards, error) from error


def random_states() -> dict[str, Any]:
    """Return the states of all random generators of this process."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"python": random.getstate(), "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(), "cuda": cuda}  # fmt: skip


def set_random_states(states: Mapping[str, Any]) -> None:
    """Restore the result of `random_states`."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def write_driver_random(step_dir: Path) -> None:
    """Save the driver's random states."""
    (step_dir / DRIVER_FILE).parent.mkdir(exist_ok=True)
    torch.save(random_states(), step_dir / DRIVER_FILE)


def read_driver_random(step_dir: Path) -> None:
    """Restore the driver's random states, if the checkpoint has them. Raises ModelError."""
    path = step_dir / DRIVER_FILE
    if path.exists():
        with checkpoint_errors(path):
            set_random_states(read_state_file(path))
