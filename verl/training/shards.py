"""The ranks' part of a checkpoint: each writes and reads its own shards, in distributed form.

Either the caller waits for the write, or it runs in the background from a copy of this rank's
shards in host memory. A rank that cannot write still takes part to the end, since the others wait
for it in collectives.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from verl.training.checkpoint_files import (
    checkpoint_errors,
    load_tensors,
    random_states,
    read_state_file,
    reason,
    set_random_states,
)
from verl.training.fsdp import FsdpModel, LossScale
from verl.training.lora import check_same_adapters
from verl.training.weights import copy_tokenizer

ADAPTERS_FILE = "adapters.json"
CRITIC_FOLDER = "critic"
"""Below a checkpoint, the files of a critic that had devices of its own, as those beside it."""


class ShardWriter:
    """Writes this rank's part of checkpoints, one at a time; all ranks make the same calls."""

    _group: dist.ProcessGroup | None = None
    _shards: Future[Any] | None = None
    _problem = ""

    def start(
        self, directory: Path, engines: Mapping[str, FsdpModel],
        model_config: PretrainedConfig | None,
    ) -> None:  # fmt: skip
        """Copy this rank's shards to host memory and begin to write them; training may go on."""
        assert self._shards is None, "the checkpoint before is still being written: call finish"
        if self._group is None:
            # Its own, since the ranks talk while training goes on; in host memory, so gloo.
            self._group = dist.new_group(backend="gloo")
        self._problem = _write_own(directory, engines, model_config)
        shards = async_save(
            _tensors(engines), checkpoint_id=directory / "shards", process_group=self._group
        )
        assert isinstance(shards, Future), "the answer without a stager of our own"
        self._shards = shards

    def finish(self) -> str:
        """Wait for what `start` began; what went wrong, or an empty text."""
        assert self._shards is not None, "nothing is being written"
        shards, self._shards = self._shards, None
        try:
            shards.result()
        except (OSError, CheckpointException) as error:
            return self._problem or reason(error)
        return self._problem


def save_shards(
    directory: Path, engines: Mapping[str, FsdpModel], model_config: PretrainedConfig | None
) -> str:
    """Write this rank's part of all engines; every rank calls it with the same directory. Returns
    what went wrong, or an empty text."""
    problem = _write_own(directory, engines, model_config)
    try:
        save(_tensors(engines), checkpoint_id=directory / "shards")
    except (OSError, CheckpointException) as error:
        problem = problem or reason(error)
    dist.barrier()
    return problem


def shard_bytes(engines: Mapping[str, FsdpModel]) -> int:
    """Bytes of this rank's shards, which is what a copy of them takes."""
    found = _tensors(engines).values()
    return sum((x.to_local() if isinstance(x, DTensor) else x).nbytes for x in found)


def _write_own(
    directory: Path, engines: Mapping[str, FsdpModel], model_config: PretrainedConfig | None
) -> str:
    """Write the small files of this rank; what went wrong, or an empty text."""
    schedules = {name: {"last_epoch": engine.num_updates_done} for name, engine in engines.items()}
    scales = {name: asdict(e.loss_scale) for name, e in engines.items() if e.loss_scale}
    own = rank_file(directory, dist.get_rank())
    try:
        own.parent.mkdir(parents=True, exist_ok=True)
        state = {"schedules": schedules, "loss_scales": scales, "random": random_states()}
        torch.save(state, own)
        if dist.get_rank() == 0:
            records = _adapter_records(engines)
            if records:
                (directory / ADAPTERS_FILE).write_text(json.dumps(records, indent=1) + "\n")
            if model_config is not None:
                model_config.save_pretrained(directory / "huggingface")
                copy_tokenizer(str(model_config.name_or_path), directory / "huggingface")
    except (OSError, RuntimeError) as error:  # torch.save turns a full disk into a RuntimeError
        return reason(error)
    return ""


def load_shards(directory: Path, engines: Mapping[str, FsdpModel]) -> None:
    """Take up what `save_shards` wrote, whatever number of ranks wrote it, and beside whatever.

    A rank that did not exist then keeps its random states. Raises ConfigError for other adapters
    than the checkpoint's, or another base below them; ModelError for files that cannot be used.
    """
    saved = read_adapters(directory)
    check_same_adapters(
        {name: saved[name] for name in engines if name in saved}, _adapter_records(engines)
    )
    homes = {name: shard_folder(directory, name) for name in engines}
    for number, folder in enumerate(dict.fromkeys(homes.values())):
        here = {name: engine for name, engine in engines.items() if homes[name] == folder}
        _load_from(folder, here, with_random=number == 0)
    dist.barrier()


def _load_from(folder: Path, engines: Mapping[str, FsdpModel], with_random: bool) -> None:
    load_tensors(_tensors(engines), folder / "shards")
    own = rank_file(folder, dist.get_rank())
    state = read_state_file(own if own.exists() else rank_file(folder, 0))
    with checkpoint_errors(own):
        for name, engine in engines.items():
            engine.num_updates_done = int(state["schedules"][name]["last_epoch"])
            scale = state.get("loss_scales", {}).get(name)  # older checkpoints, and other formats
            if engine.loss_scale is not None and scale is not None:
                engine.loss_scale = LossScale(scale["value"], scale["num_finite"])
        if own.exists() and with_random:
            set_random_states(state["random"])


def shard_folders(directory: Path) -> list[Path]:
    """The folders of a checkpoint that hold shards: its own, and that of a critic by itself."""
    return list(dict.fromkeys(shard_folder(directory, name) for name in ("actor", "critic")))


def shard_folder(directory: Path, name: str) -> Path:
    """Where a checkpoint has the shards of an engine."""
    apart = directory / CRITIC_FOLDER
    return apart if name == "critic" and apart.is_dir() else directory


def _adapter_records(engines: Mapping[str, FsdpModel]) -> dict[str, Any]:
    """The options and base of each engine that trains an adapter."""
    return {name: record for name, engine in engines.items() if (record := engine.adapter_record())}


def read_adapters(step_dir: Path) -> dict[str, Any]:
    """The adapters that a checkpoint holds, by engine; none where all weights were trained. Raises
    ModelError."""
    found: dict[str, Any] = {}
    for path in (folder / ADAPTERS_FILE for folder in shard_folders(step_dir)):
        with checkpoint_errors(path):
            found |= json.loads(path.read_text()) if path.exists() else {}
    return found


def rank_file(directory: Path, rank: int) -> Path:
    """Where a rank keeps what is its own alone."""
    return directory / "ranks" / f"rank_{rank}.pt"


def _tensors(engines: Mapping[str, FsdpModel]) -> dict[str, Tensor]:
    """All tensors to keep, by flat name; loading fills them in place."""
    found = ((name, engine.state_tensors()) for name, engine in engines.items())
    return {f"{name}.{key}": tensor for name, own in found for key, tensor in own.items()}
