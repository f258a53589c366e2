"""The way of new weights from training ranks to engines (`Transport`), and its default: files.

`rollout.weight_sync` names the class of a transport, which has up to three parts in one file: the
transport itself on the driver; a sender on each training rank; and, if engines do not read a
folder, a receiver in each worker process of an engine.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from verl import plugins
from verl.config import Config
from verl.engine import RolloutEngine
from verl.errors import ConfigError
from verl.weights.node_folder import NodeFolder, new_path, on_node

if TYPE_CHECKING:
    from verl.single_controller.actors import RayWorkerGroup

OPTION = "actor_rollout_ref.rollout.weight_sync"
TRANSPORTS = {
    "files": "verl.weights.files:Files",
    "ipc": "verl.ext.transports.ipc:Ipc",
    "nccl": "verl.ext.transports.nccl:Nccl",
}
"""Import paths of the built-in transports; a module is imported only when it is selected."""
ADDRESS = "://"
"""Stands between a transport's name and an address of its own, where no folder is loaded."""


class Rank(Protocol):
    """What a sender uses of its training rank."""

    rank: int
    device: torch.device
    num_local: int
    """Ranks on this node that train the policy."""

    def policy_weights(self, dtype: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and whole tensor of each weight; all ranks iterate together, to the end.

        The caller casts the weights to `dtype`.
        """

    def write_policy(self, directory: Path, dtype: str, writer: int, num_writers: int) -> float:
        """Write what engines load together with the other ranks; returns the seconds of writing."""


class Ranks(Protocol):
    """What a transport uses of the ranks: their group, to call `sender.METHOD`."""

    group: RayWorkerGroup


class Engines(Protocol):
    """What a transport uses of the rollout replicas; every method may raise ReplicaLost."""

    group: RayWorkerGroup

    @property
    def dtype(self) -> str:
        """The number format in which engines load weights."""

    @property
    def loading(self) -> Sequence[int]:
        """Versions that replicas are still loading."""

    def call(self, method: str) -> list[Any]:
        """Call a method of every replica, for example `engine.devices`; returns the results."""

    def pause(self, version: int) -> None:
        """Return once nothing samples; sampling goes on when `version` has been loaded."""

    def load(self, sources: Sequence[str], version: int) -> None:
        """Have each replica load its source, between turns; does not wait.

        A source is a folder, or a name of the transport, `://` and an address for its receiver.
        """


class Transport(ABC):
    """Sends the policy's weights to the engines; one object on the driver for the whole run."""

    sender: ClassVar[type[Any]]
    """Builds the part on a rank, from a `Rank`; it has the methods that `send` calls, and `close`.
    Ranks are called together."""
    receiver: ClassVar[type[Any] | None] = None
    """Builds the part in a worker of an engine, from its torch device. Its `receive(address)`
    yields the name and a tensor of each weight, and may raise ConnectionError."""
    shares_memory: ClassVar[bool] = False
    """Whether other processes map the ranks' device memory, so that it may not be expandable."""

    metrics: Mapping[str, float] = MappingProxyType({})
    """Metrics of the last `send`, besides its seconds."""

    def __init__(self, config: Config) -> None:
        """Nothing runs yet."""
        self.config = config

    @classmethod
    def problems(cls, config: Config, engine: type[RolloutEngine]) -> Iterator[ConfigError]:
        """Yield why a run cannot send weights this way to its engines."""
        yield from ()

    @classmethod
    def device_bytes(cls, largest: int) -> int:
        """Return the bytes that a rank allocates to send; `largest` are those of one tensor."""
        return 0

    @abstractmethod
    def send(self, ranks: Ranks, engines: Engines, version: int) -> dict[str, float]:
        """Have the engines load the ranks' weights; returns once the ranks may change them.

        The result has the seconds of `gather` (the ranks' own work), `write` (writing or sending)
        and `wait` (for running turns), if it did.
        """

    @abstractmethod
    def resend(self, engines: Engines) -> None:
        """Have engines that were started again load the version of the last `send`, if any.

        After a `send` that raised ReplicaLost it is that version too, if the ranks took part in it.
        """


def transport_class(name: str) -> type[Transport]:
    """Return the class for a value of `rollout.weight_sync`. Raises ConfigError."""
    kind: type[Transport] = plugins.load(OPTION, name, TRANSPORTS)
    return kind


def selected_transport(config: Config) -> type[Transport]:
    """Return the class of a run's transport. Raises ConfigError."""
    return transport_class(config.actor_rollout_ref.rollout.weight_sync)


class FolderWriter:
    """Writes the policy into the memory of its node, together with the node's other ranks."""

    def __init__(self, rank: Rank) -> None:
        """Write nothing yet."""
        self._rank = rank
        self._folder: NodeFolder | None = None

    def write(self, directory: str, version: int, needed: Sequence[int], dtype: str) -> float:
        """Write subfolder `version` of `directory`; returns the seconds of writing.

        Of the other subfolders only the versions in `needed` are kept.
        """
        writer = self._rank.rank % self._rank.num_local
        if writer == 0:
            self._folder = self._folder or NodeFolder(Path(directory))
            self._folder.keep_only({str(number) for number in needed})
        dist.barrier()  # wait until the folder exists
        folder = Path(directory, str(version))
        return self._rank.write_policy(folder, dtype, writer, self._rank.num_local)

    def close(self) -> None:
        """Remove the weights from the node's memory."""
        if self._folder is not None:
            self._folder.close()


class Files(Transport):
    """Ranks write safetensors into the memory of each node, or below `rollout.weights_dir`."""

    sender = FolderWriter

    def __init__(self, config: Config) -> None:
        """Choose the folder; nothing is written yet."""
        super().__init__(config)
        root = config.actor_rollout_ref.rollout.weights_dir
        self._folder = new_path(None if root is None else Path(root))
        self._version: int | None = None

    def send(self, ranks: Ranks, engines: Engines, version: int) -> dict[str, float]:
        """Write the weights, then have the engines read them when they can."""
        start, group = time.perf_counter(), ranks.group
        options = version, engines.loading, engines.dtype
        write = float(max(group.scatter("sender.write", self._folders(group), *options)))
        self._version = version
        self.resend(engines)
        return {"gather": time.perf_counter() - start - write, "write": write}

    def resend(self, engines: Engines) -> None:
        """Have the engines read the last version, whose folder is still there."""
        if self._version is not None:
            version = self._version
            engines.load(
                [f"{folder}/{version}" for folder in self._folders(engines.group)], version
            )

    def _folders(self, group: RayWorkerGroup) -> list[str]:
        """Return the folder on the node of each actor."""
        return [str(on_node(self._folder, place.node_id)) for place in group.locations()]
