"""The models of a rank of which policy, critic or both are adapters on a frozen base."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from verl.config import AdapterConfig, Config
from verl.config.policy import BlocksConfig
from verl.errors import ConfigError, UserError
from verl.ext.lora.adapter import record_of_peft_config
from verl.ext.lora.base import write_base
from verl.ext.lora.choice import engine_takes_adapter
from verl.ext.lora.model import (
    Role,
    build_adapted_model,
    peft_config,
    share_base_model,
    write_adapter,
)
from verl.model_files import model_errors
from verl.preflight.undecided import shares_base
from verl.remote_code import trusts_remote_code
from verl.training.fsdp import FsdpModel
from verl.training.roles import Roles, has_critic


@dataclass
class AdaptedRoles(Roles):
    """A policy with an adapter is its own reference, and shares its base with the critic's."""

    _policy: FsdpModel | None = field(init=False, default=None)
    """The policy, if it has an adapter."""

    @property
    def _shares_base(self) -> bool:
        return self.has_critic and shares_base(self.config)

    def dtype_of(self, model: BlocksConfig) -> torch.dtype:
        """Return the compute dtype for the frozen base of an adapter."""
        return self.compute_dtype if model.has_adapter else super().dtype_of(model)

    def build_policy(self) -> tuple[FsdpModel, FsdpModel | None]:
        """Build the actor with the adapters of the base; the reference is the base without them."""
        section = self.config.actor_rollout_ref
        if not section.model.has_adapter:
            return super().build_policy()
        with self.open(section.model, section.model.path) as lm:
            self.prepare(lm, section.model)
            adapters: dict[Role, AdapterConfig] = {Role.ACTOR: section.model}
            if self._shares_base:
                adapters[Role.CRITIC] = self.config.critic.model
            actor = build_adapted_model(lm, adapters, self.device, self.actor_options())
        self._policy, reference = actor, None
        if self.config.needs_reference:
            reference = share_base_model(actor, Role.REFERENCE, self.reference_options())
        return actor, reference

    def build_critic(self) -> FsdpModel:
        """Build the critic, on the policy's base if both have adapters."""
        model = self.config.critic.model
        if self._policy is not None and self._shares_base:
            return share_base_model(self._policy, Role.CRITIC, self.critic_options())
        if not model.has_adapter:
            return super().build_critic()
        with self.open(model, self.config.critic_path, needs_head=False) as lm:
            self.prepare(lm, model)
            adapters = {Role.CRITIC: model}
            return build_adapted_model(lm, adapters, self.device, self.critic_options())

    def write_for_engines(
        self, actor: FsdpModel, directory: Path, dtype: str, writer: int, num_writers: int
    ) -> float:
        """Write the adapter alone, by one rank of each node, for engines that take it."""
        if not engine_takes_adapter(self.config):
            return super().write_for_engines(actor, directory, dtype, writer, num_writers)
        return write_adapter(actor, directory if writer == 0 else None)

    def save_adapter(self, directory: str) -> None:
        """Write the policy's adapter as a peft folder, on the first rank's node."""
        assert self._policy is not None, "all weights of the policy are trained"
        write_adapter(self._policy, Path(directory) if dist.get_rank() == 0 else None)
        if dist.get_rank() == 0:
            write_base(Path(directory), self.config.actor_rollout_ref.model.path)

    @classmethod
    def records(cls, config: Config) -> dict[str, Any]:
        """Return the adapters' records; empty if a model is given by hub name.

        Raises ConfigError for a model without the layers that an adapter is for.
        """
        policy, critic = config.actor_rollout_ref.model, config.critic.model
        sections: dict[str, tuple[str, AdapterConfig, str]] = {
            "actor": ("actor_rollout_ref.model", policy, policy.path)
        }
        if has_critic(config):
            sections["critic"] = ("critic.model", critic, config.critic_path)
        adapted = {role: section for role, section in sections.items() if section[1].has_adapter}
        return {role: expected_record(*section) for role, section in adapted.items()}


def expected_record(key: str, options: AdapterConfig, path: str) -> dict[str, Any]:
    """Return the record of this adapter for a checkpoint, from a model without weights."""
    try:
        with torch.device("meta"):
            code = {"trust_remote_code": trusts_remote_code()}
            with model_errors(path):
                config = AutoConfig.from_pretrained(path, **code)
            lm = AutoModelForCausalLM.from_config(config, **code)
        return record_of_peft_config(peft_config(lm, options))
    except (UserError, OSError, ValueError) as error:
        raise ConfigError(f"{key}: {error}") from error
