"""The cores and threads of each process on a CPU, where ranks and engines would share them all."""

import contextlib
import os
from collections.abc import Iterator, Sequence

import torch

from verl.config import Config
from verl.errors import ResourceError, explain
from verl.training.devices import device_type
from verl.training.network import joins_cluster


def prepare_rank(config: Config, num_local: int, num_others: int, comes_first: bool) -> None:
    """Give this process the cores and threads of a rank; see `share_threads`."""
    if device_type(config.trainer.device) == "cpu":
        if config.placement.is_split:
            pin_to_cores(config.trainer.rollout_gpus, is_engine=False)
        share_threads(num_local, num_others, comes_first)


def prepare_engine(config: Config) -> None:
    """Give this process the cores of an engine, if engines have their own."""
    if config.placement.is_split and device_type(config.trainer.device) == "cpu":
        pin_to_cores(config.trainer.rollout_gpus, is_engine=True)


def problems(config: Config) -> Iterator[ResourceError]:
    """Yield an error if engines leave no core of this machine to the ranks."""
    if device_type(config.trainer.device) == "cpu" and not joins_cluster():
        try:
            cores_for(config.trainer.rollout_gpus, is_engine=False)
        except ResourceError as error:
            yield error


def cores_for(num_engine_cores: int, is_engine: bool) -> list[int]:
    """Return the cores of the engines, the first ones, or of the ranks, the others.

    Raises ResourceError if no core is left for the ranks.
    """
    cores = sorted(os.sched_getaffinity(0))
    if num_engine_cores >= len(cores):
        key = "trainer.rollout_gpus"
        got = f"{num_engine_cores} of {len(cores)} cores here for engines"
        expected, fix = "fewer: on CPU the ranks use the others", f"{key}={len(cores) // 2}"
        raise ResourceError(explain(key, got, expected, fix))
    return cores[:num_engine_cores] if is_engine else cores[num_engine_cores:]


def pin_to_cores(num_engine_cores: int, is_engine: bool) -> None:
    """Restrict this process and its children to the cores of the engines or of the ranks."""
    set_affinity(cores_for(num_engine_cores, is_engine))


def set_affinity(cores: Sequence[int]) -> None:
    """Restrict this process and its children to these cores."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # the thread ended meanwhile
            os.sched_setaffinity(int(thread), cores)
    os.environ["OMP_NUM_THREADS"] = str(len(cores))
    torch.set_num_threads(len(cores))


def share_threads(num_processes: int, num_others: int = 0, comes_first: bool = True) -> None:
    """Set this process's thread count to its share of the available cores.

    It is one of `num_processes` that work at the same time; `num_others` processes of another
    group may run as well. If there is a core for each process, the two groups get separate cores;
    `comes_first` says which group gets the lower ones.
    """
    cores = sorted(os.sched_getaffinity(0))
    num_sharing = num_processes + num_others
    if num_others and len(cores) >= num_sharing:
        num_first = num_processes if comes_first else num_others
        cut = len(cores) * num_first // num_sharing
        set_affinity(cores[:cut] if comes_first else cores[cut:])
        num_sharing = num_processes
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_sharing))
