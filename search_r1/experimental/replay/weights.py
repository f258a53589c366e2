"""The options of a recorded run, and where the weights that sampled its trajectories are."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from search_r1.runs.folder import read_config
from verl.config import Config
from verl.errors import ConfigError, explain

FIRST_VERSION = 1
"""Version of the weights that a run starts from."""
MAX_RETRIES, DEADLINE_S = 2, 20.0
"""Limits for searches during a replay, since a user is waiting."""


def read_run_config(
    folder: Path, device: str | None = None, retriever_url: str | None = None
) -> Config:
    """Return a run's options, adapted to replaying one dialogue at a time. Raises ConfigError."""
    recorded = read_config(folder)
    if not recorded:
        expected = "a run's trainer.default_local_dir, with config.yaml"
        raise ConfigError(explain("RUN", folder, expected, "name the folder of a run"))
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Config), recorded)
        config: Any = OmegaConf.to_object(merged)
    except (OmegaConfBaseException, ValueError, TypeError, AttributeError, LookupError) as error:
        got, expected = " ".join(str(error).split()), "options that this release knows"
        fix = "replay with the release that made the run"
        raise ConfigError(explain(f"{folder}/config.yaml", got, expected, fix)) from error
    rollout, retriever = config.actor_rollout_ref.rollout, config.retriever
    rollout.url = rollout.replay = None  # the user's servers must not receive other weights
    rollout.merge_adapter = True
    retriever.max_retries = min(MAX_RETRIES, retriever.max_retries)
    retriever.deadline = min(DEADLINE_S, retriever.deadline or DEADLINE_S)
    retriever.url = retriever_url or retriever.url
    config.trainer.device = device or config.trainer.device
    return config  # type: ignore[no-any-return]


def find_weights(run: Path, config: Config) -> dict[int, str]:
    """Return the path of each version's weights: checkpoints, and the model of the run's start."""
    # torch takes a second to import
    from verl.checkpoint.folders import RunState, all_complete, is_complete  # noqa: PLC0415

    resumed_from = Path(config.trainer.resume_mode)
    paths = {FIRST_VERSION: config.actor_rollout_ref.model.path}
    for folder in [*all_complete(run), *([resumed_from] if is_complete(resumed_from) else [])]:
        state = RunState.read(folder)
        paths[state.step + 1 if state.version is None else state.version] = str(folder)
    return paths


def nearest_version(known: Iterable[int], version: int) -> int:
    """Return the known version closest to `version`; of two, the older."""
    return min(known, key=lambda other: (abs(other - version), other))
