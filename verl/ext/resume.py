"""Checks whether a run may resume from a checkpoint: intact, and of the same experiment.

Each option's field declares what happens if its value differs from the checkpoint's
(`verl.config.option`). Other data, tools or models, compared by fingerprint, are refused unless
`trainer.resume_anyway` names them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.agent.environment import Environment
from verl.agent.served import fingerprints
from verl.checkpoint import folders
from verl.checkpoint.contents import check_files
from verl.checkpoint.folders import RunState
from verl.config import Config
from verl.config.cli import public_options
from verl.config.known import flatten, known_options
from verl.core_algos.chosen import advantage_estimator
from verl.data.rows import file_list
from verl.data.trajectories import recorded_files
from verl.errors import ConfigError, ModelError
from verl.model_files import tokenizer_identity, weights_fingerprint
from verl.training.checkpoint_files import checkpoint_errors

logger = logging.getLogger(__name__)


def record(config: Config, environment: Environment, tokenizer: Any) -> dict[str, Any]:
    """Return the run's `identity`, after checking the checkpoint to resume from, if any."""
    present = identity(config, {**fingerprints(environment), **tokenizer_identity(tokenizer)})
    check_contents(config)
    check_resume(config, present)
    return present


def identity(config: Config, served: Mapping[str, str]) -> dict[str, Any]:
    """Return the `config` and `fingerprints` that a checkpoint stores for comparison, as JSON.

    `served`: fingerprints of the content that the tools serve, such as corpus and index.
    """
    rollouts = config.data.rollouts
    data_files = config.data.train_files if rollouts is None else recorded_files(rollouts)
    weights = {name: weights_fingerprint(path) for name, path in _model_paths(config).items()}
    found = {
        "data": hash_files(data_files),
        "validation": hash_files(config.data.val_files),
        **weights,
        **served,
    }
    return {"config": public_options(config), "fingerprints": found}


def _model_paths(config: Config) -> dict[str, str]:
    """Return the paths of the models whose weights are compared, by the fingerprints' names."""
    critic = config.critic.model.path
    own = {} if critic is None else {"critic": critic}
    return {"model": config.actor_rollout_ref.model.path, **own}


def hash_files(files: str | Sequence[str]) -> str:
    """Return a SHA-256 (16 hex digits) of the files' contents, in order; paths do not matter."""
    digest = hashlib.sha256()
    for path in file_list(files):
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


def check_resume(config: Config, present: Mapping[str, Any]) -> None:
    """Raise ConfigError if the checkpoint to resume from belongs to another experiment.

    `present` is this run's `identity`. The error lists every difference and, where there is
    one, the option that would accept it.
    """
    root = Path(config.trainer.default_local_dir)
    step_dir = folders.resume_folder(config.trainer.resume_mode, root)
    if step_dir is None:
        return
    saved = folders.read_state(step_dir)
    if "config" not in saved:
        logger.warning("%s does not record the options and data that it was made with", step_dir)
        return
    with checkpoint_errors(step_dir / folders.STATE_FILE):
        problems = [
            *_option_differences(saved, present, config),
            *_content_differences(saved, present, config),
        ]
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise ConfigError(
            f"trainer.resume_mode: {step_dir} is from a different experiment than this one; give "
            f"the options it was made with or another trainer.default_local_dir, or accept the "
            f"differences by name:\n{lines}"
        )


def check_contents(config: Config) -> None:
    """Check that the checkpoint to resume from, if any, is as it was written.

    Raises ModelError, which names an earlier checkpoint to use instead, if there is one.
    """
    root = Path(config.trainer.default_local_dir)
    step_dir = folders.resume_folder(config.trainer.resume_mode, root)
    if step_dir is None:
        return
    try:
        check_files(step_dir)
        RunState.read(step_dir)
    except ModelError as error:
        step = folders.step_of(step_dir)
        earlier = [p for p in folders.all_complete(step_dir.parent) if folders.step_of(p) < step]
        advice = f" (trainer.resume_mode={earlier[-1]})" if earlier else ""
        raise ModelError(f"{error}{advice}") from error


def _option_differences(
    saved: Mapping[str, Any], present: Mapping[str, Any], config: Config
) -> Iterator[str]:
    """Yield the refused differences of options; logs those that are only logged."""
    old, new = flat(saved["config"]), flat(present["config"])
    for key in sorted(old.keys() & new.keys()):
        kind = known_options()[key].limits.resume
        if kind == "free" or old[key] == new[key]:
            continue
        change = f"{key}: got {_shorten(new[key])}, the checkpoint has {_shorten(old[key])}"
        needs_new_critic = key == "algorithm.adv_estimator" and (
            advantage_estimator(new[key]).needs_critic
            and not advantage_estimator(old[key]).needs_critic
        )
        if kind == "fixed" or needs_new_critic:
            yield f"{change}; the saved state cannot be used with another value"
        elif kind == "experiment" and not any(
            f"{key}.".startswith(f"{name}.") for name in config.trainer.resume_anyway
        ):
            yield f"{change}; to continue anyway: {_accepting_option(config, key)}"
        else:
            logger.warning("resuming with another %s", change)


def _content_differences(
    saved: Mapping[str, Any], present: Mapping[str, Any], config: Config
) -> Iterator[str]:
    """Yield the refused differences of content; logs those that are accepted or not comparable."""
    old, new = saved["fingerprints"], dict(present["fingerprints"])
    for name, path in _model_paths(config).items():
        new[name] = weights_fingerprint(path, old.get(name))
    for name in sorted({*old, *new}):
        if old.get(name) == new.get(name):
            continue
        change = f"{name}: got {new.get(name)}, the checkpoint has {old.get(name)} (fingerprints)"
        if name not in old or name in config.trainer.resume_anyway:
            logger.warning("resuming with another %s", change)
        else:
            yield f"{change}; to continue anyway: {_accepting_option(config, name)}"


def _accepting_option(config: Config, name: str) -> str:
    return f"trainer.resume_anyway=[{','.join([*config.trainer.resume_anyway, name])}]"


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the known options in a nested configuration, by dotted key."""
    known, switches = known_options(), config.get("compat")
    if isinstance(switches, Mapping):  # of checkpoints before 2026-11-28
        config = {**config, "compat": "search_r1" if all(switches.values()) else "none"}
    options = flatten(config, is_whole=known.__contains__)
    return {key: _expand_home(value) for key, value in options if key in known}


def _expand_home(value: Any) -> Any:
    """Replace `~` by the home directory, since some checkpoints store paths unexpanded."""
    if isinstance(value, list):
        return [_expand_home(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _expand_home(item) for key, item in value.items()}
    return os.path.expanduser(value) if isinstance(value, str) else value


def _shorten(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
