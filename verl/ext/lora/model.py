"""One frozen base model that serves as policy, reference and, if it has an adapter, critic.

The policy is the base with the adapter `actor`, the reference is the base alone, and the critic is
the base with the adapter `critic` and a value head. peft injects the adapters; this module decides
which of them is active and which parameters each role trains.
"""

import enum
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from verl.config import ALL_LINEAR, AdapterConfig
from verl.errors import ConfigError, explain
from verl.ext.lora.adapter import Adapter, peft_config_of_record, record_of_peft_config
from verl.training.fsdp import FsdpModel, FsdpOptions
from verl.training.models import (
    LogProbModel,
    PackedInputs,
    blocks,
    build_value_head,
    target_values,
    trunk_of,
)
from verl.training.weights import write_together


class Role(enum.StrEnum):
    """The role an adapted model plays; policy and critic have an adapter of that name."""

    ACTOR = "actor"
    REFERENCE = "reference"
    CRITIC = "critic"


def target_names(lm: PreTrainedModel, targets: str | list[str]) -> list[str]:
    """Resolve the option `target_modules` to names of linear layers, without their paths.

    Example: all-linear in a Llama is q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj and
    down_proj. Raises ConfigError for a name that is no linear layer below the output head, or one
    whose weight Mamba's fused kernels read without calling the layer, and with it the adapter.
    """
    head = lm.get_output_embeddings()
    is_mamba = any(hasattr(module, "A_log") and hasattr(module, "D") for module in lm.modules())
    available = sorted({
        name.rpartition(".")[2] for name, module in lm.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    } - ({"out_proj"} if is_mamba else set()))  # fmt: skip
    names = [targets] if isinstance(targets, str) else list(targets)
    if names == [ALL_LINEAR]:
        return available
    unknown = [name for name in names if name not in available]
    if unknown or not names:
        got, expected = ", ".join(unknown) or "none", f"some of {', '.join(available)}"
        raise ConfigError(explain("target_modules", got, expected, f"target_modules={ALL_LINEAR}"))
    return sorted(names)


def peft_config(lm: PreTrainedModel, options: AdapterConfig) -> LoraConfig:
    """Build peft's config, as an adapter's folder records it, from the run's options."""
    return peft_config_of_record({
        "lora_rank": options.lora_rank,
        "lora_alpha": options.lora_alpha,
        "target_modules": target_names(lm, options.target_modules),
        "base": lm.config.name_or_path,
    })  # fmt: skip


class AdaptedModel(LogProbModel):
    """A frozen language model with an adapter for each of `adapters`, used in one role at a time.

    Adapters and the critic's value head are float32 and trained; the base keeps its dtype. New
    adapters change no output, since B is 0; the value head is 0 as well.
    """

    def __init__(self, lm: PreTrainedModel, adapters: Mapping[Role, AdapterConfig]) -> None:
        super().__init__(lm)
        lm.requires_grad_(False)
        self.configs = {role: peft_config(lm, options) for role, options in adapters.items()}
        with warnings.catch_warnings():
            # peft warns of a second adapter in the same model, which is intended here.
            warnings.filterwarnings("ignore", "Already found a `peft_config`")
            for role, config in self.configs.items():
                inject_adapter_in_model(config, lm, adapter_name=str(role))
        for parameter in self._adapter_parameters():
            parameter.data = parameter.data.float()
        if Role.CRITIC in adapters:
            self.value_head = build_value_head(lm)
        self.role: Role | None = None
        self.use(next(iter(adapters)))

    @classmethod
    def of_rank(cls, lm: PreTrainedModel, role: str, lora_rank: int) -> Self:
        """Build a model with one adapter in all its linear layers."""
        return cls(lm, {Role(role): AdapterConfig(lora_rank=lora_rank)})

    def _adapter_parameters(self) -> list[nn.Parameter]:
        return [p for name, p in self.lm.named_parameters() if ".lora_" in name]

    def use(self, role: Role) -> None:
        """Switch to `role`; call it only while no weights are gathered."""
        if role is self.role:
            return
        for layer in self.lm.modules():
            if isinstance(layer, BaseTunerLayer):
                layer.enable_adapters(role in self.configs)
                if role in self.configs:
                    layer.set_adapter([str(role)])
        # peft freezes all but the active adapter, but FSDP decides only once what has a gradient.
        for parameter in self._adapter_parameters():
            parameter.requires_grad_(True)
        self.role = role

    def forward(self, inputs: PackedInputs, *arguments: Any) -> Any:
        """Return the critic's values, (num_targets,) float32; other roles as LogProbModel."""
        if self.role is Role.CRITIC:
            return target_values(trunk_of(self.lm), self.value_head, inputs)
        return super().forward(inputs, *arguments)


@dataclass
class AdaptedFsdpModel(FsdpModel):
    """An adapted model in one role; other roles share the module but train other parameters."""

    module: AdaptedModel
    role: Role = Role.ACTOR

    def forward(self, *arguments: Any) -> Any:
        self.module.use(self.role)
        return self.module(*arguments)

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        own = [f".lora_A.{self.role}.", f".lora_B.{self.role}."]
        own += ["value_head."] * (self.role is Role.CRITIC)
        named = super().trained_parameters()
        return {name: p for name, p in named.items() if any(x in name for x in own)}

    def record(self) -> dict[str, Any]:
        return record_of_peft_config(self.module.configs[self.role])

    def adapter(self) -> Adapter:
        """Gather the role's adapter, whole on every rank; every rank must call this."""
        config = self.module.configs[self.role]
        return Adapter.of_parameters(config, self.full_trained_parameters(), self.role)

    def policy_weights(self, dtype: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights with the adapter merged: in float32, the others in the base's dtype."""
        adapter = self.adapter()
        named = self.full_parameters(prefix="lm.", keep=lambda name: base_name(name) is not None)
        yield from adapter.merge((str(base_name(name)), tensor) for name, tensor in named)


def build_adapted_model(
    lm: PreTrainedModel, adapters: Mapping[Role, AdapterConfig], device: torch.device,
    options: FsdpOptions,
) -> FsdpModel:  # fmt: skip
    """Build the model in the first role of `adapters`; `share_base_model` makes the others."""
    module, role = AdaptedModel(lm, adapters), next(iter(adapters))
    heads = [module.value_head] if Role.CRITIC in adapters else []
    return AdaptedFsdpModel(module, blocks(lm, lm), device, options, heads, role=role)


def adapted_policy(
    lm: PreTrainedModel, options: AdapterConfig, device: torch.device, fsdp: FsdpOptions
) -> FsdpModel:
    """Build a policy that trains an adapter, without reference and critic."""
    return build_adapted_model(lm, {Role.ACTOR: options}, device, fsdp)


def continued_policy(
    lm: PreTrainedModel, options: AdapterConfig, device: torch.device, fsdp: FsdpOptions,
    folder: Path,
) -> FsdpModel:  # fmt: skip
    """Build a policy that trains on an adapter of `folder`. Raises ConfigError unless it fits."""
    module = AdaptedModel(lm, {Role.ACTOR: options})
    start = Adapter.read(folder)
    own = dict(module.lm.named_parameters())
    expected = {n for n in own if f".{Role.ACTOR}.weight" in n and ".lora_" in n}
    found = {n.replace(".weight", f".{Role.ACTOR}.weight"): t for n, t in start.tensors.items()}
    same_form = (start.config.r, start.config.lora_alpha) == (options.lora_rank, options.lora_alpha)
    if not same_form or found.keys() != expected:
        got = f"rank {start.config.r}, alpha {start.config.lora_alpha}, {len(found)} matrices"
        wanted = f"rank {options.lora_rank}, alpha {options.lora_alpha}, {len(expected)} matrices"
        fix = "set lora_rank, lora_alpha and target_modules as it was trained"
        raise ConfigError(explain(f"adapter_path {folder}", got, wanted, fix))
    with torch.no_grad():
        for name, tensor in found.items():
            own[name].copy_(tensor)
    return AdaptedFsdpModel(module, blocks(lm, lm), device, fsdp)


def write_adapter(model: FsdpModel, directory: Path | None) -> float:
    """Gather the adapter that a model trains; the ranks that have a folder write it, for peft.

    Returns the seconds of writing. Raises ResourceError after all ranks have taken part.
    """
    assert isinstance(model, AdaptedFsdpModel), "all weights are trained: there is no adapter"
    adapter = model.adapter()

    def write() -> float:
        start = time.perf_counter()
        if directory is not None:
            adapter.write(directory)
        return time.perf_counter() - start

    return write_together(directory or Path(), write)


def share_base_model(model: FsdpModel, role: Role, options: FsdpOptions) -> FsdpModel:
    """Return the same adapted model in another role."""
    assert isinstance(model, AdaptedFsdpModel), "all weights are trained: they cannot be shared"
    return AdaptedFsdpModel(model.module, model.blocks, model.device, options, role=role)


def base_name(name: str) -> str | None:
    """Return the name that an adapted `lm`'s parameter has in the base; None for an adapter's."""
    # For example, `layers.0.q_proj.base_layer.weight` gives `layers.0.q_proj.weight`.
    return None if ".lora_" in name else name.replace(".base_layer.", ".")
