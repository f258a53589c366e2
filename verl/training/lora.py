"""A frozen base with low-rank adapters: one set of weights that answers for policy and reference.

The policy is the base with the adapter `actor`, the reference is the base alone, and the critic,
where it has an adapter too, is the base with the adapter `critic` and a value head. peft puts the
adapters in; this module decides which of them is in force, and who learns which.
"""

from __future__ import annotations

import enum
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from verl.config import ALL_LINEAR, AdapterConfig
from verl.errors import ConfigError, explain
from verl.training.adapters import Adapter, config_of
from verl.training.fsdp import FsdpModel, FsdpOptions
from verl.training.models import LogProbModel, PackedInputs, blocks, build_value_head, values


class Role(enum.StrEnum):
    """Whom an adapted model answers for; policy and critic have an adapter of that name."""

    ACTOR = "actor"
    REFERENCE = "reference"
    CRITIC = "critic"


def target_names(lm: PreTrainedModel, wanted: str | list[str]) -> list[str]:
    """Names of the linear layers that `wanted` means, without their path.

    Example: of a Llama, all-linear is q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj and
    down_proj. Raises ConfigError for a name that is no linear layer below the output head.
    """
    head = lm.get_output_embeddings()
    found = sorted({
        name.rpartition(".")[2] for name, module in lm.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    })  # fmt: skip
    names = [wanted] if isinstance(wanted, str) else list(wanted)
    if names == [ALL_LINEAR]:
        return found
    unknown = [name for name in names if name not in found]
    if unknown or not names:
        raise ConfigError(
            explain("target_modules", ", ".join(unknown) or "none", f"some of {', '.join(found)}",
                    f"target_modules={ALL_LINEAR}")
        )  # fmt: skip
    return sorted(names)


def peft_config(lm: PreTrainedModel, options: AdapterConfig) -> LoraConfig:
    """peft's form of an adapter's options, as its folder records it too."""
    return config_of({
        "lora_rank": options.lora_rank,
        "lora_alpha": options.lora_alpha,
        "target_modules": target_names(lm, options.target_modules),
        "base": lm.config.name_or_path,
    })  # fmt: skip


class AdaptedModel(LogProbModel):
    """A frozen language model with an adapter for each of `adapters`, answering for one role.

    Adapters and the critic's value head are float32 and learn; the base keeps the dtype it was
    loaded in. A new adapter changes nothing: B is 0, and so is the value head.
    """

    def __init__(self, lm: PreTrainedModel, adapters: Mapping[Role, AdapterConfig]) -> None:
        super().__init__(lm)
        lm.requires_grad_(False)
        self.configs = {role: peft_config(lm, options) for role, options in adapters.items()}
        with warnings.catch_warnings():
            # Of two adapters in one model, as here.
            warnings.filterwarnings("ignore", "Already found a `peft_config`")
            for role, config in self.configs.items():
                inject_adapter_in_model(config, lm, adapter_name=str(role))
        for parameter in self._adapter_parameters():
            parameter.data = parameter.data.float()
        if Role.CRITIC in adapters:
            self.value_head = build_value_head(lm)
        self.role: Role | None = None
        self.use(next(iter(adapters)))

    @property
    def float32_modules(self) -> list[nn.Module]:
        """Parts that compute in float32 whatever the compute dtype."""
        return [self.value_head] if Role.CRITIC in self.configs else []

    def _adapter_parameters(self) -> list[nn.Parameter]:
        return [p for name, p in self.lm.named_parameters() if ".lora_" in name]

    def use(self, role: Role) -> None:
        """Answer for `role` from now on; call it only while no weights are gathered."""
        if role is self.role:
            return
        for layer in self.lm.modules():
            if isinstance(layer, BaseTunerLayer):
                layer.enable_adapters(role in self.configs)
                if role in self.configs:
                    layer.set_adapter([str(role)])
        # peft lets only the adapter in force learn, but FSDP settles once what has a gradient.
        for parameter in self._adapter_parameters():
            parameter.requires_grad_(True)
        self.role = role

    def forward(self, inputs: PackedInputs, *arguments: Any) -> Any:
        """Values, (num_targets,) float32, for the critic; else as LogProbModel."""
        if self.role is Role.CRITIC:
            return values(self.lm.get_decoder(), self.value_head, inputs)
        return super().forward(inputs, *arguments)


@dataclass
class AdaptedFsdpModel(FsdpModel):
    """One role of an adapted model; those of other roles share the module, and learn other
    parameters."""

    module: AdaptedModel
    role: Role = Role.ACTOR

    def forward(self, *arguments: Any) -> Any:
        """What the model answers in this role."""
        self.module.use(self.role)
        return self.module(*arguments)

    def learned(self) -> dict[str, nn.Parameter]:
        """The parameters that this role trains and saves, by name."""
        own = [f".lora_A.{self.role}.", f".lora_B.{self.role}."]
        own += ["value_head."] * (self.role is Role.CRITIC)
        return {name: p for name, p in super().learned().items() if any(x in name for x in own)}

    def record(self) -> dict[str, Any]:
        """The options and base of this role's adapter."""
        return Adapter(self.module.configs[self.role], {}).record()


def adapted_engine(
    lm: PreTrainedModel,
    adapters: Mapping[Role, AdapterConfig],
    device: torch.device,
    options: FsdpOptions,
) -> FsdpModel:
    """An engine that learns the first of `adapters`; `share` makes one for each other role."""
    module, role = AdaptedModel(lm, adapters), next(iter(adapters))
    heads = module.float32_modules
    return AdaptedFsdpModel(module, blocks(lm, lm), device, options, heads, role=role)


def share(engine: FsdpModel, role: Role, options: FsdpOptions) -> FsdpModel:
    """An engine for another role of the same adapted model."""
    assert isinstance(engine, AdaptedFsdpModel), "all weights are trained: they cannot be shared"
    return AdaptedFsdpModel(engine.module, engine.blocks, engine.device, options, role=role)


def policy_adapter(engine: FsdpModel) -> Adapter:
    """The adapter that an engine trains, whole on every rank; every rank must call this."""
    assert isinstance(engine, AdaptedFsdpModel), "all weights are trained: there is no adapter"
    return Adapter.of_parameters(
        engine.module.configs[engine.role], engine.full_learned(), engine.role
    )


def policy_weights(engine: FsdpModel, dtype: str) -> Iterator[tuple[str, Tensor]]:
    """Name and whole tensor of each weight of the policy, its adapter merged if it has one.

    To be written as `dtype`; merged weights come in that of the sum. Every rank must run the
    iteration to its end.
    """
    if not isinstance(engine, AdaptedFsdpModel):
        yield from engine.full_parameters(prefix="lm.", dtype=getattr(torch, dtype))
        return
    adapter = policy_adapter(engine)
    named = engine.full_parameters(prefix="lm.", keep=lambda name: base_name(name) is not None)
    yield from adapter.merge((str(base_name(name)), tensor) for name, tensor in named)


def base_name(name: str) -> str | None:
    """The name that a parameter of an adapted model's `lm` has without adapters; None if added.

    Example: `layers.0.q_proj.base_layer.weight` is `layers.0.q_proj.weight`.
    """
    return None if ".lora_" in name else name.replace(".base_layer.", ".")
