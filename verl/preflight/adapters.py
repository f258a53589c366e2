"""Adapters against the model and the checkpoint they are meant for, before any rank starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from verl.checkpoint import folders
from verl.config import AdapterConfig, Config
from verl.core_algos.advantages import ADVANTAGES
from verl.errors import ConfigError, UserError
from verl.model_files import model_errors
from verl.remote_code import trusts_remote_code
from verl.training.adapters import Adapter, check_same
from verl.training.lora import peft_config
from verl.training.shards import read_adapters


def adapter_problems(config: Config) -> Iterator[UserError]:
    """Layers that a model does not have, and a checkpoint of other adapters or another base.

    A model that is a name of the hub is looked at by the ranks only.
    """
    policy, critic = config.actor_rollout_ref.model, config.critic.model
    sections: list[tuple[str, AdapterConfig, str]] = [
        ("actor_rollout_ref.model", policy, policy.path)
    ]
    if ADVANTAGES[config.algorithm.adv_estimator].needs_critic:
        sections.append(("critic.model", critic, critic.path or policy.path))
    if not all(Path(path).expanduser().is_dir() for _, _, path in sections):
        return
    records: dict[str, Any] = {}
    try:
        for key, options, path in sections:
            if options.has_adapter:
                records["actor" if options is policy else "critic"] = _record(key, options, path)
        folder = Path(config.trainer.default_local_dir)
        step_dir = folders.resolve(config.trainer.resume_mode, folder)
        if step_dir is not None:
            check_same(read_adapters(step_dir), records)
    except ConfigError as error:
        yield error


def _record(key: str, options: AdapterConfig, path: str) -> dict[str, Any]:
    """What a checkpoint would say about this adapter, from a model without weights."""
    try:
        with torch.device("meta"):
            code = {"trust_remote_code": trusts_remote_code()}
            with model_errors(path):
                config = AutoConfig.from_pretrained(path, **code)
            lm = AutoModelForCausalLM.from_config(config, **code)
        return Adapter(peft_config(lm, options), {}).record()
    except (UserError, OSError, ValueError) as error:
        raise ConfigError(f"{key}: {error}") from error
