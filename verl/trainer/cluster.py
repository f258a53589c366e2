"""Joins or starts a run's Ray cluster, and makes options valid for processes on its nodes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import ray

from verl import plugins, seams
from verl.agent.wording import is_file
from verl.config import Config
from verl.config.option import PathKind
from verl.errors import ConfigError, ResourceError, explain
from verl.proxies import bypass_loopback
from verl.socket_folder import socket_folder
from verl.training.devices import device_type
from verl.training.network import joins_cluster

RAY_ROOM = 72
"""Bytes that Ray appends to its folder for the path of a socket."""
JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Environment variable that is set if `ray job submit` started the driver."""
MODES_WITHOUT_FOLDER = ("disable", "auto")
"""Values of `trainer.resume_mode` that are not a folder."""
ROOT = Path(__file__).resolve().parents[2]
"""The checkout, or the folder that the packages are installed in."""


def start_ray(config: Config, init: Callable[..., object] = ray.init) -> None:
    """Join the cluster at RAY_ADDRESS (as `ray job submit` sets it), or start a local one.

    Raises ResourceError if the cluster does not answer, or Ray's processes do not start in time.
    """
    bypass_loopback()
    address = os.environ.get("RAY_ADDRESS")
    if address:
        check_run_folder(config)
        join_cluster(address)
        return
    ranks = sum(group.num_ranks for group in config.placement.groups.values())
    num_cpus = max(len(os.sched_getaffinity(0)), ranks)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # else a run crawls behind a browser
    folder = f"{socket_folder('RAY_TMPDIR', 'TMPDIR', room=RAY_ROOM)}/ray"
    try:
        init("local", include_dashboard=False, num_cpus=num_cpus, logging_level=logging.WARNING,
             _temp_dir=folder)  # fmt: skip
    except Exception as error:
        if type(error) is not Exception:  # Ray's, when its processes take longer than 30 s
            raise
        fix = f"let other programs on this machine end, then start again (Ray's logs: {folder})"
        raise ResourceError(explain("Ray", str(error), "a start within 30 s", fix)) from error


def join_cluster(address: str) -> None:
    """Connect to a running cluster; its workers import this checkout if they see it."""
    if os.environ.get(JOB_CONFIG):  # Ray has set up the job's environment on all nodes
        ray.init()
        return
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    try:
        ray.init(runtime_env={"env_vars": {"PYTHONPATH": path}})
    except (ConnectionError, ValueError) as error:  # ValueError: the address has no host and port
        is_connection_error = isinstance(error, ConnectionError)
        got = f"{address} ({'no answer, or access denied' if is_connection_error else error})"
        fix = (
            "start Ray there (docs/guides/clusters.md); if the lines above say InvalidAuthToken, "
            "export RAY_AUTH_MODE=token and give every node the same ~/.ray/auth_token"
        )
        raise ResourceError(explain("RAY_ADDRESS", got, "a running Ray cluster", fix)) from error


def check_run_folder(config: Config) -> None:
    """Raise ConfigError for a run folder in a Ray job's copy of the checkout, which Ray deletes."""
    folder = Path(config.trainer.default_local_dir)
    if "runtime_resources" in folder.absolute().parts:
        key = "trainer.default_local_dir"
        expected = "a folder outside of it, on a file system that all nodes share"
        got = f"{folder}, in Ray's copy of the job"
        raise ConfigError(explain(key, got, expected, f"{key}=/shared/runs/NAME"))


def uses_gpus(config: Config) -> bool:
    """Whether ranks compute on GPUs. The driver of a cluster may have none itself."""
    if config.trainer.device == "auto" and joins_cluster():
        return bool(ray.cluster_resources().get("GPU"))
    return device_type(config.trainer.device) == "cuda"


def config_for_actors(config: Config, use_gpu: bool) -> Config:
    """Return the config for processes on other nodes and in other working directories.

    Paths of models, files and user code are absolute, and the device is decided, because `auto`
    might mean different devices for driver, ranks and engines.
    """
    config = absolute_paths(config)
    config = replace(config, trainer=replace(config.trainer, device="cuda" if use_gpu else "cpu"))
    for chooser in seams.plugged(seams.ENGINES):
        config = chooser.for_actors(config)
    return config


def absolute_paths(section: Any) -> Any:
    """Return a copy of the options in which those with a `path` are absolute (`config.option`)."""
    changes: dict[str, Any] = {}
    for field in fields(section):
        value = getattr(section, field.name)
        if is_dataclass(value):
            changes[field.name] = absolute_paths(value)
            continue
        limits = field.metadata.get("limits")
        if value is None or limits is None or limits.path is None:
            continue
        absolute = ABSOLUTE[limits.path]
        is_list = isinstance(value, list)
        changes[field.name] = [absolute(item) for item in value] if is_list else absolute(value)
    return replace(section, **changes)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _absolute_model(path: str) -> str:
    return _absolute(path) if Path(path).expanduser().is_dir() else path  # else a name of the hub


ABSOLUTE: Mapping[PathKind, Callable[[str], str]] = {
    "code": plugins.absolute,
    "model": _absolute_model,
    "file": _absolute,
    "template": lambda name: _absolute(name) if is_file(name) else name,
    "checkpoint": lambda mode: mode if mode in MODES_WITHOUT_FOLDER else _absolute(mode),
}
"""How the value of an option becomes absolute, by what it locates."""
