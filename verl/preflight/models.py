"""Checks of a run's models: complete, of a family that is trained right, with room for the data."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
from huggingface_hub import constants, get_token, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import PretrainedConfig

from verl import plugins
from verl.checkpoint import folders
from verl.config import Config, DataConfig
from verl.errors import ConfigError, ModelError, PreflightError, UserError, explain
from verl.model_files import check_context, check_model, describe_error, model_errors
from verl.preflight import hub_models
from verl.proxies import client_settings
from verl.quantization import check_unquantized
from verl.training.family import check_family
from verl.training.loading import model_folder
from verl.training.network import joins_cluster
from verl.training.roles import has_critic, roles_class
from verl.training.shards import check_same_records, read_records

HUB_SECONDS = 10.0
"""Seconds that the hub may take to answer."""


def model_problems(config: Config) -> Iterator[UserError]:
    """Yield problems of the policy's model, and of the critic's if it is another one."""
    path = config.actor_rollout_ref.model.path
    yield from _path_problems("actor_rollout_ref.model.path", path, data=config.data)
    critic_path = config.critic.model.path
    if has_critic(config) and critic_path not in (None, path):
        yield from _path_problems("critic.model.path", str(critic_path), policy_path=path)


def sharing_problems(config: Config) -> Iterator[UserError]:
    """Check that ranks can compute each model together, if the options ask for it."""
    if any(role.ranks_per_shard > 1 for role in config.placement.roles.values()):
        yield from plugins.imported("verl.ext.sequence_parallel:problems")(config)


def _path_problems(
    key: str, path: str, policy_path: str | None = None, data: DataConfig | None = None
) -> Iterator[UserError]:
    """Check that `path` is a complete model: a folder, a cached hub model, or a known hub name.

    Of a hub model that is not on this machine, all but the weights is downloaded and checked.
    Its packed forward pass must be its own. A critic must share the tokenizer of `policy_path`;
    lengths of `data` must fit the context.
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
        check_family(model, key)
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
        url, headers=headers, timeout=HUB_SECONDS, follow_redirects=True, **client_settings(url)
    )


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
            check_same_records(read_records(step_dir), records)
    except ConfigError as error:
        yield error


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
