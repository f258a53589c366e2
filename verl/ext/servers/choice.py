"""Servers of `rollout.url` as the engines of a run, in place of those that it would start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from verl.config import Config
from verl.rollout.interface import URL, Choice

WEIGHTS_DIR = "actor_rollout_ref.rollout.weights_dir"


def choice(config: Config) -> Choice | None:
    """Return the servers as engines; None if the run starts its own."""
    if not config.placement.servers:
        return None
    from verl.ext.servers.engine import VllmServer  # noqa: PLC0415 - only where asked for

    return Choice(VllmServer, f"a server of {URL}")


def for_actors(config: Config) -> Config:
    """Return the options with an absolute `weights_dir`."""
    section = config.actor_rollout_ref
    if section.rollout.weights_dir is None:
        return config
    folder = str(Path(section.rollout.weights_dir).expanduser().absolute())
    rollout = replace(section.rollout, server=section.rollout.server | {"weights_dir": folder})
    return replace(config, actor_rollout_ref=replace(section, rollout=rollout))
