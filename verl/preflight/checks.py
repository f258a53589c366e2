"""Checks on the driver, before a run starts, that it has everything it needs.

Model, adapters, questions, tools, devices, disk and tracking packages are checked; the error lists
every problem on its own line. Rules between options are in `verl.config.rules`.
"""

import functools
import importlib.util
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from huggingface_hub import constants, get_token, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import PretrainedConfig

from verl import plugins
from verl.agent.environment import Environment
from verl.checkpoint import folders
from verl.config import Config, DataConfig
from verl.data.rows import load_rows
from verl.errors import (
    ConfigError,
    DataError,
    ModelError,
    PreflightError,
    ResourceError,
    UserError,
    explain,
)
from verl.model_files import check_context, check_model, describe_error, model_errors, read_config
from verl.monitor.tracking import BACKENDS, LIBRARIES, backend_names
from verl.preflight import hub_models
from verl.preflight.memory.check import decide_memory, memory_problems, read_setting
from verl.preflight.memory.needs import has_critic
from verl.proxies import client_settings
from verl.quantization import check_unquantized
from verl.rollout.interface import engine_problems, selected_class
from verl.training.devices import cores_for
from verl.training.family import check_family
from verl.training.kernels import kernel_problems
from verl.training.loading import model_folder, weight_bytes
from verl.training.network import joins_cluster
from verl.training.roles import roles_class
from verl.training.sequence_parallel import check_heads
from verl.training.shards import check_same_records, read_adapters

logger = logging.getLogger(__name__)

PROBE_SECONDS = 10.0
"""Seconds that a tool or the hub may take to answer."""
CHECKPOINT_FACTOR = 3
"""Bytes of a checkpoint per byte of weights: at least fp32 weights and two Adam moments."""
MIN_FREE_BYTES = 1 << 30


def preflight(
    config: Config, environment: Environment,
    optional: Sequence[Callable[[Config], Iterable[UserError]]] = (),
) -> Config:  # fmt: skip
    """Check that the run can start, and return its options with those left to the machine decided.

    `optional` are the checks of optional features.
    Raises PreflightError with all problems.
    """
    problems: list[UserError] = list(engine_problems(config)) if config.samples_rollouts else []
    if problems:  # the memory check depends on the engine
        raise PreflightError(problems)
    problems = list(model_problems(config)) or list(_sequence_parallel_problems(config))
    checks: list[Callable[[Config], Iterable[UserError]]] = [
        *((_question_problems, selected_class(config).problems) if config.samples_rollouts else ()),
        *optional,
        lambda _: environment.preflight(PROBE_SECONDS),
        kernel_problems,
        _device_problems,
        _disk_problems,
        _tracking_problems,
    ]
    if not problems:  # these checks read the model
        setting = read_setting(config)
        config = decide_memory(config, setting)
        checks += [record_problems, functools.partial(memory_problems, setting=setting)]
    problems += [problem for check in checks for problem in check(config)]
    if problems:
        raise PreflightError(problems)
    logger.info("preflight: model, data, tools, devices and disk are ready")
    return config


def fetch_models(config: Config) -> None:
    """Download the weights of hub models and check them, in a run on this machine.

    A cluster's nodes download theirs (`verl.ext.nodes`). Raises PreflightError.
    """
    if joins_cluster():
        return
    names = [name for name in hub_models.hub_names(config) if hub_models.is_missing(name)]
    for name in names:
        hub_models.fetch_weights(name)
    problems = list(model_problems(config)) if names else []
    if problems:
        raise PreflightError(problems)


def model_problems(config: Config) -> Iterator[UserError]:
    """Yield problems of the policy's model, and of the critic's if it is another one."""
    path = config.actor_rollout_ref.model.path
    sp_size = config.actor_rollout_ref.actor.ulysses_sequence_parallel_size
    yield from _path_problems("actor_rollout_ref.model.path", path, sp_size, data=config.data)
    critic_path = config.critic.model.path
    if has_critic(config) and critic_path not in (None, path):
        yield from _path_problems(
            "critic.model.path", str(critic_path), config.placement.critic.sp_size, policy_path=path
        )


def _sequence_parallel_problems(config: Config) -> Iterator[UserError]:
    """Check that sequence-parallel sizes divide the attention heads of each downloaded model."""
    policy, actor = config.actor_rollout_ref.model, config.actor_rollout_ref.actor
    sp_sizes = [("actor_rollout_ref.actor", policy.path, actor.ulysses_sequence_parallel_size)]
    if has_critic(config):
        sp_sizes.append(("critic", config.critic_path, config.placement.critic.sp_size))
    for section, path, size in sp_sizes:
        folder = model_folder(path)
        if size > 1 and folder is not None:  # the ranks check a model that they download
            try:
                check_heads(read_config(str(folder)), size, section)
            except ConfigError as error:
                yield error


def _path_problems(
    key: str, path: str, sp_size: int = 1, policy_path: str | None = None,
    data: DataConfig | None = None,
) -> Iterator[UserError]:  # fmt: skip
    """Check that `path` is a complete model: a folder, a cached hub model, or a known hub name.

    Of a hub model that is not on this machine, all but the weights is downloaded and checked.
    Its packed forward pass, divided over `sp_size` ranks, must be its own. A critic must share the
    tokenizer of `policy_path`; lengths of `data` must fit the context.
    """
    is_name = re.fullmatch(r"\w[\w.-]{0,95}(/[\w.-]{1,96})?", path) and not Path(path).exists()
    try:
        if is_name:
            check_unquantized(key, path, _hub_config(key, path))
        awaits_weights = is_name and hub_models.is_missing(path)
        if awaits_weights:
            hub_models.fetch_description(path, key)
        folder = str(model_folder(path) or path)
        tokenizer = policy_path and str(model_folder(policy_path) or policy_path)
        model = check_model(
            key, folder, needs_head=policy_path is None, tokenizer_of=tokenizer,
            has_weights=not awaits_weights,
        )  # fmt: skip
        check_family(model, key, sp_size)
        if data is not None:
            names = ("data.max_prompt_length", "data.max_response_length")
            check_context(model, folder, data, *names)
    except (ConfigError, ModelError) as error:
        yield error


def _hub_config(key: str, name: str) -> Mapping[str, Any]:
    """Return a model's config.json from the hub's cache, or what the hub says about it.

    Raises ModelError if a model of this name cannot be loaded.
    """
    try:
        cached = try_to_load_from_cache(name, "config.json")
        if isinstance(cached, str):
            with model_errors(name, "config.json", key):
                return PretrainedConfig.get_config_dict(Path(cached).parent)[0]
        problem = "not in the hub's cache, and HF_HUB_OFFLINE is set"
        if not constants.HF_HUB_OFFLINE:
            answer = _ask_hub(name)
            if answer.is_success:
                return dict(answer.json().get("config") or {})
            problem = f"and the hub says {answer.status_code}"
    except HFValidationError as error:
        problem = f"and no hub name: {describe_error(error)}"
    except (httpx.HTTPError, ValueError) as error:  # no answer, or one that is not JSON
        problem = f"and the hub does not answer: {describe_error(error)}"
    expected = "a model folder or a hub name that can be loaded"
    fix = f"correct it, or on a machine with network: hf download {name}"
    raise ModelError(explain(key, f"{name} (no such folder, {problem})", expected, fix))


def _ask_hub(name: str) -> httpx.Response:
    """Ask the hub for a model; plainly, as the errors of huggingface_hub differ by version."""
    token = get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    url = f"{constants.ENDPOINT}/api/models/{name}"
    return httpx.get(
        url, headers=headers, timeout=PROBE_SECONDS, follow_redirects=True, **client_settings(url)
    )


def _question_problems(config: Config) -> Iterator[UserError]:
    """Check that the question files are readable, valid, and have enough rows for one batch."""
    data = config.data
    train_rows = 1 if config.trainer.val_only else data.train_batch_size
    for key, files, limit, min_rows in (
        ("train", data.train_files, data.train_data_num, train_rows),
        ("val", data.val_files, data.val_data_num, 1),
    ):
        try:
            num_rows = len(load_rows(files, data.prompt_key))
        except DataError as error:
            yield DataError(f"data.{key}_files: {error}")
            continue
        usable = num_rows if limit is None else min(limit, num_rows)
        if usable < min_rows:
            expected = f"data.{key}_batch_size={min_rows} or more"
            fix = f"set data.{key}_batch_size={usable}, or give more rows"
            yield DataError(explain(f"data.{key}_files", f"{usable} rows", expected, fix))


def _device_problems(config: Config) -> Iterator[UserError]:
    """Check that this machine has enough devices; on a cluster (RAY_ADDRESS) Ray checks it."""
    if joins_cluster():
        return
    trainer, key, num_gpus = config.trainer, "trainer.n_gpus_per_node", torch.cuda.device_count()
    for name, nodes in (("trainer", trainer.nnodes), ("critic", config.critic.nnodes or 1)):
        if nodes > 1:
            fix = (
                "start a Ray cluster and export RAY_ADDRESS (docs/guides/clusters.md), or nnodes=1"
            )
            got, expected = f"{nodes} without RAY_ADDRESS", "1 node, or a cluster"
            yield ResourceError(explain(f"{name}.nnodes", got, expected, fix))
    if trainer.device == "cuda" or (trainer.device == "auto" and num_gpus):
        if num_gpus < config.placement.gpus_per_node:
            separate = {"trainer.rollout_gpus": trainer.rollout_gpus,
                        "critic.n_gpus_per_node": config.critic.n_gpus_per_node}  # fmt: skip
            separate = {name: number for name, number in separate.items() if number}
            fix = f"set {key}={num_gpus}" if num_gpus else "set trainer.device=cpu, or add a GPU"
            if separate and num_gpus:
                fix = f"lower them to {num_gpus} together, or leave out {' and '.join(separate)}"
            counts = [str(trainer.n_gpus_per_node), *(f"{k}={n}" for k, n in separate.items())]
            got = f"{' and '.join(counts)} with {num_gpus} GPUs here"
            yield ResourceError(explain(key, got, "as many", fix))
        return
    num_cores = os.cpu_count() or 1
    num_ranks = sum(group.per_node for group in config.placement.groups.values())
    try:
        cores_for(trainer.rollout_gpus, is_engine=False)
    except ResourceError as error:
        yield error
    if num_ranks > max(2, num_cores):
        got = f"{num_ranks} ranks with no GPU and {num_cores} cores"
        expected = "a GPU each, or on CPU at most one rank per core"
        yield ResourceError(explain(key, got, expected, f"set {key}=1"))


def _disk_problems(config: Config) -> Iterator[UserError]:
    """Check that the results folder is writable and has space for one checkpoint."""
    key, target = "trainer.default_local_dir", Path(config.trainer.default_local_dir).absolute()
    existing = next(folder for folder in (target, *target.parents) if os.path.exists(folder))
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        expected = "a folder that can be written"
        fix = f"set {key} to another folder"
        yield ResourceError(explain(key, f"{target} ({existing} is not writable)", expected, fix))
        return
    saves = config.trainer.save_freq != 0 and not config.trainer.val_only
    policy, critic = config.actor_rollout_ref.model, config.critic.model
    trained = [] if policy.has_adapter else [policy.path]
    if has_critic(config) and not critic.has_adapter:
        trained.append(config.critic_path)
    # Checkpoints of adapters are small, but the run ends by exporting the whole, merged model.
    size = CHECKPOINT_FACTOR * sum(map(weight_bytes, trained)) or weight_bytes(policy.path)
    needed = max(MIN_FREE_BYTES, size) if saves else 0
    free = shutil.disk_usage(existing).free
    if free < needed:
        got = f"{free / 2**30:.1f} GiB free at {existing}"
        fix = f"free some, set {key} to another disk, or trainer.save_freq=0"
        purpose = "a checkpoint" if trained else "the model exported at the end of the run"
        expected = f"{needed / 2**30:.1f} GiB for {purpose}"
        yield ResourceError(explain(key, got, expected, fix))


def _tracking_problems(config: Config) -> Iterator[UserError]:
    """Check that the packages, or the files, of the chosen trackers are there."""
    for name in backend_names(config.trainer.logger):
        # A folder of an earlier run, such as wandb/, counts as a namespace package without origin.
        spec = importlib.util.find_spec(name) if name in LIBRARIES else None
        if name in LIBRARIES and (spec is None or spec.origin is None):
            fix = f"pip install {name}, or trainer.logger=[console,jsonl]"
            expected = "an installed package"
            yield ConfigError(explain("trainer.logger", f"{name}, not installed", expected, fix))
        try:
            plugins.resolve("trainer.logger", name, BACKENDS)
        except ConfigError as error:
            yield error


def record_problems(config: Config) -> Iterator[UserError]:
    """Check that the options fit the models, and that a checkpoint is of such models.

    Models given by hub name are checked by the ranks only.
    """
    paths = [config.actor_rollout_ref.model.path, *([config.critic_path] * has_critic(config))]
    if not all(Path(path).expanduser().is_dir() for path in paths):
        return
    try:
        records = roles_class(config).records(config)
        folder = Path(config.trainer.default_local_dir)
        step_dir = folders.resume_folder(config.trainer.resume_mode, folder)
        if step_dir is not None:
            check_same_records(read_adapters(step_dir), records)
    except ConfigError as error:
        yield error
