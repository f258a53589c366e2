"""Whether a run may go on from a checkpoint: whole, of the same data, tools, model and options.

Each option's field says what another value than the checkpoint's leads to (`verl.config.option`).
Other content, by its fingerprint, is refused unless `trainer.resume_anyway` names it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.checkpoint import ahead, folders
from verl.checkpoint.folders import DRIVER_FILE, RunState
from verl.config import Config
from verl.config.cli import public_options
from verl.config.known import flatten, known_options
from verl.core_algos.advantages import ADVANTAGES
from verl.data.rows import file_list
from verl.data.trajectories import recorded_files
from verl.errors import ConfigError, ModelError
from verl.training.checkpoint_files import ShardReader, checkpoint_errors, read_state_file
from verl.training.lora import fingerprint
from verl.training.shards import rank_file, read_adapters, shard_folders

logger = logging.getLogger(__name__)


def identity(config: Config, served: Mapping[str, str]) -> dict[str, Any]:
    """What a checkpoint keeps for a later comparison, as JSON: `config` and `fingerprints`.

    `served`: the fingerprints of what the tools serve, empty where they give none.
    """
    recorded = config.data.rollouts
    learned = config.data.train_files if recorded is None else recorded_files(recorded)
    fingerprints = {
        "data": hash_files(learned),
        "validation": hash_files(config.data.val_files),
        "model": fingerprint(config.actor_rollout_ref.model.path),
        **served,
    }
    if config.critic.model.path is not None:
        fingerprints["critic"] = fingerprint(config.critic.model.path)
    return {"config": public_options(config), "fingerprints": fingerprints}


def hash_files(files: str | Sequence[str]) -> str:
    """SHA-256 of the files' content, in order, wherever they lie."""
    digest = hashlib.sha256()
    for path in file_list(files):
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


def check_resume(config: Config, present: Mapping[str, Any]) -> None:
    """Refuse to resume what is not this run's, before any rank is built; `present`: its `identity`.

    Raises ConfigError with every difference, and with what would accept it.
    """
    root = Path(config.trainer.default_local_dir)
    step_dir = folders.resolve(config.trainer.resume_mode, root)
    if step_dir is None:
        return
    saved = folders.read_state(step_dir)
    if "config" not in saved:
        logger.warning("%s does not say with which options and data it was made", step_dir)
        return
    with checkpoint_errors(step_dir / folders.STATE_FILE):
        problems = [*_options(saved, present, config), *_fingerprints(saved, present, config)]
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise ConfigError(
            f"trainer.resume_mode: {step_dir} is of another run than this one would be; give what "
            f"it was made with, another trainer.default_local_dir, or accept by name:\n{lines}"
        )


def check_contents(config: Config) -> None:
    """Read all but the tensors of what a run starts from, if anything.

    Raises ModelError, which names an earlier checkpoint.
    """
    root = Path(config.trainer.default_local_dir)
    step_dir = folders.resolve(config.trainer.resume_mode, root)
    if step_dir is None:
        return
    try:
        folders.refuse_changes(step_dir)
        RunState.read(step_dir)
        ahead.read(step_dir)
        read_adapters(step_dir)
        if (step_dir / DRIVER_FILE).exists():
            read_state_file(step_dir / DRIVER_FILE)
        for folder in shard_folders(step_dir):
            read_state_file(rank_file(folder, 0))
            ShardReader(folder / "shards").read_metadata()
    except ModelError as error:
        step = folders.step_of(step_dir)
        earlier = [p for p in folders.all_complete(step_dir.parent) if folders.step_of(p) < step]
        advice = f" (trainer.resume_mode={earlier[-1]})" if earlier else ""
        raise ModelError(f"{error}{advice}") from error


def _options(saved: Mapping[str, Any], present: Mapping[str, Any], config: Config) -> Iterator[str]:
    """Refused differences of options; those that are only logged are logged here."""
    old, new = flat(saved["config"]), flat(present["config"])
    for key in sorted(old.keys() & new.keys()):
        kind = known_options()[key].limits.resume
        if kind == "free" or old[key] == new[key]:
            continue
        change = f"{key}: got {_short(new[key])}, the checkpoint has {_short(old[key])}"
        needs_new_critic = (key == "algorithm.adv_estimator" and ADVANTAGES[new[key]].needs_critic
                            and not ADVANTAGES[old[key]].needs_critic)  # fmt: skip
        if kind == "fixed" or needs_new_critic:
            yield f"{change}; what was saved cannot be used otherwise"
        elif kind == "experiment" and not any(
            f"{key}.".startswith(f"{name}.") for name in config.trainer.resume_anyway
        ):
            yield f"{change}; to go on all the same: {_accept(config, key)}"
        else:
            logger.warning("resuming with another %s", change)


def _fingerprints(
    saved: Mapping[str, Any], present: Mapping[str, Any], config: Config
) -> Iterator[str]:
    """Refused differences of content; what cannot be compared goes to the log."""
    old, new = saved["fingerprints"], present["fingerprints"]
    for name in sorted({*old, *new}):
        if old.get(name) == new.get(name):
            continue
        change = f"{name}: got {new.get(name)}, the checkpoint has {old.get(name)} (fingerprints)"
        if name not in old or name in config.trainer.resume_anyway:
            logger.warning("resuming with another %s", change)
        else:
            yield f"{change}; to go on all the same: {_accept(config, name)}"


def _accept(config: Config, name: str) -> str:
    return f"trainer.resume_anyway=[{','.join([*config.trainer.resume_anyway, name])}]"


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """The options of today by dotted key, as far as a configuration, a nested dict, has them."""
    known = known_options()
    found = flatten(config, is_whole=known.__contains__)
    return {key: _expanded(value) for key, value in found if key in known}


def _expanded(value: Any) -> Any:
    """With the user's home for `~`, which some checkpoints have in its place, and others not."""
    if isinstance(value, list):
        return [_expanded(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _expanded(item) for key, item in value.items()}
    return os.path.expanduser(value) if isinstance(value, str) else value


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
