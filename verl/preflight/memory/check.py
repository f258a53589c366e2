"""The run's memory against this machine's, before anything is loaded.

What waits on the host is chosen where the options leave it open. What cannot fit is refused, what
is close is warned of, both with settings that would fit. What other nodes of a cluster have is not
seen from here: on a cluster nothing is refused.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import AutoConfig

from verl.config import Config
from verl.errors import ResourceError, SearchR1Error
from verl.machine import LARGER_SHARED, Machine
from verl.preflight.memory.estimate import Estimate, Setting, estimate
from verl.preflight.memory.fitting import CLOSE, REFUSED, Limit, proposals, shortages
from verl.preflight.memory.needs import Place
from verl.preflight.memory.offload import choose, everything, open_choices, settled
from verl.preflight.memory.shape import KNOWN_TYPES, ModelShape
from verl.preflight.memory.table import (
    offload_line,
    offload_words,
    proposal_line,
    shortage_line,
    table,
)
from verl.training.devices import device_type, dtype_name, resolve_dtype

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outlook:
    """What an estimate rests on: the models' sizes, and this machine."""

    setting: Setting
    machine: Machine


def look(config: Config) -> Outlook | None:
    """This machine and the models; None where nothing is to be estimated, or nothing can be."""
    if config.trainer.memory_preflight == "off":
        return None
    policy = read_shape(config.actor_rollout_ref.model.path)
    critic = read_shape(config.critic.model.path or config.actor_rollout_ref.model.path)
    if policy is None or critic is None:
        known = ", ".join(KNOWN_TYPES)
        logger.info("memory: not estimated; it is for local or cached models of type %s", known)
        return None
    on_gpu = device_type(config.trainer.device) == "cuda"
    machine = Machine.now(with_devices=on_gpu)
    return Outlook(_setting(config, policy, critic, machine, on_gpu), machine)


def settle_offload(config: Config, outlook: Outlook | None) -> Config:
    """The options with every null of `*_offload` decided; one line of the log says how, and why.

    On CPU it is false. Where this driver cannot tell what the GPUs hold, it is true, which is slow
    but never the reason that a run does not fit.
    """
    if not open_choices(config) or _is_on_cpu(config):
        return settled(config)
    if outlook is None or not outlook.machine.devices:
        chosen = everything(config)
        keys = "=false ".join(open_choices(config))
        logger.warning("%s, whether or not the GPUs have room for it, since their memory was not "
                       "estimated; to keep it on them: OFFLOAD=false (train_*.sh), or %s=false",
                       offload_words(config, chosen), keys)  # fmt: skip
        return chosen
    chosen = choose(config, outlook.setting, outlook.machine)
    without, needed = (estimate(one, outlook.setting) for one in (settled(config), chosen))
    line = offload_line(config, chosen, without, needed, outlook.machine)
    logger.info("%s", line)
    return chosen


def _is_on_cpu(config: Config) -> bool:
    """Whether no rank will have a GPU; a cluster may have some that its driver does not see."""
    on_cluster = config.trainer.device == "auto" and os.environ.get("RAY_ADDRESS")
    return device_type(config.trainer.device) == "cpu" and not on_cluster


def memory_problems(config: Config, outlook: Outlook | None) -> Iterator[SearchR1Error]:
    """ResourceError where the run cannot fit; the estimate, and what is close, are logged."""
    if outlook is None:
        return
    setting, machine = outlook.setting, outlook.machine
    found = estimate(config, setting)
    logger.info("memory needed and free:\n%s", table(found, machine))
    if setting.on_gpu and not machine.devices:
        return  # told by the check of devices
    refuses = config.trainer.memory_preflight == "refuse" and not os.environ.get("RAY_ADDRESS")
    if refuses and shortages(config, found, machine, REFUSED):
        yield ResourceError(verdict("too small", config, setting, machine, found, REFUSED))
    elif shortages(config, found, machine, CLOSE):
        logger.warning("%s", verdict("close", config, setting, machine, found, CLOSE))


def verdict(
    word: str, config: Config, setting: Setting, machine: Machine, found: Estimate, limit: Limit
) -> str:
    """What is short by `limit`, and settings that would fit with room to spare."""
    short = shortages(config, found, machine, limit)
    lines = [shortage_line(one, found) for one in short]
    options = [proposal_line(*proposal) for proposal in proposals(config, setting, machine)]
    if any(one.place is Place.SHARED for one in short):
        options.insert(0, LARGER_SHARED)
    options = options or ["free some memory, take more devices, or a smaller model"]
    refused = f"refused above {REFUSED.share:.0%} of what is free"
    rule = f"{refused}; trainer.memory_preflight=warn starts it"
    return (
        f"this machine is {word} ({rule}): {'; '.join(lines)}; expected settings that fit:\n      "
        + "\n      ".join(options)
    )


def _setting(
    config: Config, policy: ModelShape, critic: ModelShape, machine: Machine, on_gpu: bool
) -> Setting:
    device = torch.device("cuda" if on_gpu else "cpu")
    dtype = dtype_name(resolve_dtype(config.trainer.compute_dtype, device))
    total = min((memory.total for memory in machine.devices), default=0)
    return Setting(policy, critic, on_gpu, total, dtype)


def read_shape(path: str) -> ModelShape | None:
    """The model's sizes, from its folder or the hub's cache; None where they are not known."""
    try:
        facts = AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError):
        return None
    return ModelShape.of(facts.to_dict())
