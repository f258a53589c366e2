"""The ranks' part of a checkpoint: each rank writes and reads its own shards.

Shards are in PyTorch's distributed checkpoint format. Either the caller waits for the write, or it
runs in the background from a copy of this rank's shards in host memory. A rank that cannot write
still takes part to the end, since the others wait for it in collectives.
"""

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from verl.errors import ConfigError, explain
from verl.model_files import weights_fingerprint
from verl.training.checkpoint_files import (
    checkpoint_errors,
    load_tensors,
    one_line,
    random_states,
    read_state_file,
    set_random_states,
)
from verl.training.fsdp import FsdpModel, HostedAdamW
from verl.training.weights import copy_tokenizer

Models = Mapping[str, FsdpModel]
RECORDS_FILE = "adapters.json"
"""What a checkpoint records of its models beside their tensors (`FsdpModel.record`), by model."""
WHOLE = "all weights trained"
"""What a model without a record is, in messages."""


class ShardWriter:
    """Writes this rank's part of checkpoints, one at a time; all ranks make the same calls."""

    _group: dist.ProcessGroup | None = None
    _write: Future[Any] | None = None
    _error = ""

    def start(self, directory: Path, models: Models, model_config: PretrainedConfig | None) -> None:
        """Copy this rank's shards to host memory and start to write them in the background."""
        assert self._write is None, "the last checkpoint is still being written: call finish"
        if self._group is None:
            # Separate, since ranks communicate meanwhile; gloo, since copies are in host memory.
            self._group = dist.new_group(backend="gloo")
        self._error = _write_files(directory, models, model_config)
        write = async_save(
            _state_tensors(models), checkpoint_id=directory / "shards", process_group=self._group
        )
        assert isinstance(write, Future), "async_save without a stager returns a future"
        self._write = write

    def finish(self) -> str:
        """Wait for the write that `start` began; return its error, or an empty string."""
        assert self._write is not None, "nothing is being written"
        write, self._write = self._write, None
        try:
            write.result()
        except (OSError, CheckpointException) as error:
            return self._error or one_line(error)
        return self._error


def save_shards(directory: Path, models: Models, model_config: PretrainedConfig | None) -> str:
    """Write this rank's part of all models, as every rank must; return the error, or ""."""
    problem = _write_files(directory, models, model_config)
    try:
        save(_state_tensors(models), checkpoint_id=directory / "shards")
    except (OSError, CheckpointException) as error:
        problem = problem or one_line(error)
    dist.barrier()
    return problem


def shard_bytes(models: Models) -> int:
    """Return the bytes of this rank's shards, and so of a copy of them."""
    tensors = _state_tensors(models).values()
    return sum((x.to_local() if isinstance(x, DTensor) else x).nbytes for x in tensors)


def _write_files(directory: Path, models: Models, model_config: PretrainedConfig | None) -> str:
    """Write this rank's files apart from the shards; return the error, or an empty string."""
    schedules = {name: {"last_epoch": x.num_updates_done} for name, x in _optimizers(models)}
    own_file = rank_file(directory, dist.get_rank())
    try:
        own_file.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"schedules": schedules, "random": random_states()}, own_file)
        if dist.get_rank() == 0:
            records = _records(models)
            if records:
                (directory / RECORDS_FILE).write_text(json.dumps(records, indent=1) + "\n")
            if model_config is not None:
                model_config.save_pretrained(directory / "huggingface")
                copy_tokenizer(str(model_config.name_or_path), directory / "huggingface")
    except (OSError, RuntimeError) as error:  # torch.save turns a full disk into a RuntimeError
        return one_line(error)
    return ""


def load_shards(directory: Path, models: Models) -> None:
    """Load the models' state from a checkpoint, written by any number of ranks.

    The critic may have been saved with the actor's ranks or with its own. A rank without a file of
    its own keeps its random states. Raises ConfigError if the checkpoint's records are not
    the models'; ModelError for files that cannot be used.
    """
    saved = read_records(directory)
    check_same_records({name: saved[name] for name in models if name in saved}, _records(models))
    folders = {name: shard_folder(directory, name) for name in models}
    for number, folder in enumerate(dict.fromkeys(folders.values())):
        in_folder = {name: model for name, model in models.items() if folders[name] == folder}
        _load_from(folder, in_folder, with_random=number == 0)
    dist.barrier()


def _load_from(folder: Path, models: Models, with_random: bool) -> None:
    load_tensors(_state_tensors(models), folder / "shards")
    own_file = rank_file(folder, dist.get_rank())
    state = read_state_file(own_file if own_file.exists() else rank_file(folder, 0))
    with checkpoint_errors(own_file):
        for name, optimizer in _optimizers(models):
            optimizer.num_updates_done = int(state["schedules"][name]["last_epoch"])
        if own_file.exists() and with_random:
            set_random_states(state["random"])


def _optimizers(models: Models) -> Iterator[tuple[str, HostedAdamW]]:
    """Yield the optimizer of each model; saved models are trained ones."""
    for name, model in models.items():
        assert model.optimizer is not None, f"{name} is frozen"
        yield name, model.optimizer


def shard_folders(directory: Path) -> list[Path]:
    """Return the folders of a checkpoint with shards: its own, and a separate critic's if any."""
    return list(dict.fromkeys(shard_folder(directory, name) for name in ("actor", "critic")))


def shard_folder(directory: Path, name: str) -> Path:
    """Return the folder of a checkpoint with the shards of the model `name`."""
    own = directory / name  # of ranks apart from the actor's
    return own if own.is_dir() else directory


def _records(models: Models) -> dict[str, Any]:
    return {name: record for name, model in models.items() if (record := model.record())}


def check_same_records(saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Raise ConfigError if the record of any model differs from the checkpoint's."""
    for name in sorted({*saved, *present}):
        old, new = saved.get(name) or {}, dict(present.get(name) or {})
        if "fingerprint" in old and "base" in new:
            new["fingerprint"] = weights_fingerprint(new["base"], old["fingerprint"])
        # The path of the base may differ: the fingerprint says whether it is the same.
        differing = [key for key in sorted({*old, *new} - {"base"}) if old.get(key) != new.get(key)]
        if differing:
            got, expected = (
                ", ".join(f"{key}={record[key]}" for key in differing if key in record) or WHOLE
                for record in (new, old)
            )
            fix = "give the checkpoint's options, or trainer.resume_mode=disable"
            raise ConfigError(
                explain(f"{name} to resume", got, f"the checkpoint's: {expected}", fix)
            )


def read_records(step_dir: Path) -> dict[str, Any]:
    """Read a checkpoint's records, by model (may be empty). Raises ModelError."""
    records: dict[str, Any] = {}
    for path in (folder / RECORDS_FILE for folder in shard_folders(step_dir)):
        with checkpoint_errors(path):
            records |= json.loads(path.read_text()) if path.exists() else {}
    return records


def rank_file(directory: Path, rank: int) -> Path:
    """Return the file with a rank's own state: of schedules, extensions and random generators."""
    return directory / "ranks" / f"rank_{rank}.pt"


def _state_tensors(models: Models) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint by flat name; loading fills them in place."""
    return {
        f"{name}.{key}": tensor
        for name, model in models.items()
        for key, tensor in model.state_tensors().items()
    }
