"""LoRA: one frozen base model that serves as policy, reference and, if it has an adapter, critic.

The policy is the base with the adapter `actor`, the reference is the base alone, and the critic is
the base with the adapter `critic` and a value head. peft injects the adapters; this module decides
which of them is active and which parameters each role trains. Outside of a model, an adapter is a
peft folder, or is merged into the weights.
"""

import copy
import enum
import hashlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
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
from verl.training.fsdp import FsdpModel, FsdpOptions
from verl.training.models import (
    LogProbModel,
    PackedInputs,
    blocks,
    build_value_head,
    target_values,
    trunk_of,
)
from verl.training.weights import write_file

PREFIX = "base_model.model."
"""Prefix of the tensor names in an adapter's folder, as peft and vLLM expect it."""
FINGERPRINT_BYTES = 1 << 20
"""Bytes at each end of a weight file that go into its fingerprint."""


@dataclass(frozen=True)
class Adapter:
    """A trained adapter: its options and whole tensors."""

    config: LoraConfig
    tensors: Mapping[str, Tensor]
    """`<module>.lora_A.weight` (rank, in) and `<module>.lora_B.weight` (out, rank), any device."""

    @classmethod
    def of_parameters(cls, config: LoraConfig, parameters: Mapping[str, Tensor], name: str) -> Self:
        """Build it from a model's parameters, named `lm.<module>.lora_A.<name>.weight` by peft."""
        return cls(config, {
            key.removeprefix("lm.").replace(f".{name}.weight", ".weight"): tensor
            for key, tensor in parameters.items() if ".lora_" in key
        })  # fmt: skip

    @property
    def scale(self) -> float:
        """The factor of the product B A."""
        return self.config.lora_alpha / self.config.r

    def delta(self, name: str) -> Tensor | None:
        """Return what the adapter adds to the weight `name`, float32; None if nothing."""
        module = name.removesuffix(".weight")
        if f"{module}.lora_A.weight" not in self.tensors:
            return None
        a, b = (self.tensors[f"{module}.lora_{side}.weight"].float() for side in "AB")
        return self.scale * (b @ a)

    def merge(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the base's weights with the adapter merged; merged weights are float32."""
        for name, weight in named:
            delta = self.delta(name)
            yield name, weight if delta is None else weight.float() + delta.to(weight.device)

    def write(self, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        """Write the adapter as a peft folder; its weight file appears whole or not at all."""
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {
            PREFIX + name: tensor.detach().to("cpu", dtype).contiguous()
            for name, tensor in self.tensors.items()
        }
        write_file(directory / "adapter_model.safetensors", tensors)
        config = copy.copy(self.config)
        config.inference_mode = True
        config.target_modules = sorted(config.target_modules or ())  # a set's order varies
        config.save_pretrained(str(directory))


def record_of_peft_config(config: LoraConfig) -> dict[str, Any]:
    """Return a checkpoint's JSON record of an adapter: its options and its base."""
    base = str(config.base_model_name_or_path)
    return {
        "base": base,
        "fingerprint": fingerprint(base),
        "lora_rank": config.r,
        "lora_alpha": float(config.lora_alpha),
        "target_modules": sorted(config.target_modules or ()),
    }


def peft_config_of_record(record: Mapping[str, Any]) -> LoraConfig:
    """Build peft's config from a checkpoint's record of an adapter."""
    return LoraConfig(
        r=record["lora_rank"], lora_alpha=record["lora_alpha"], lora_dropout=0.0, bias="none",
        target_modules=list(record["target_modules"]), task_type="CAUSAL_LM",
        base_model_name_or_path=record["base"],
    )  # fmt: skip


def fingerprint(base: str) -> str:
    """Return a short hash of a model folder's weight files: names, sizes, and both ends of each."""
    digest = hashlib.sha256()
    files = sorted(Path(base).expanduser().glob("*.safetensors"))
    if not files:  # a hub name has no local files
        return base
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            digest.update(file.read(FINGERPRINT_BYTES))
            file.seek(max(0, size - FINGERPRINT_BYTES))
            digest.update(file.read(FINGERPRINT_BYTES))
    return digest.hexdigest()[:16]


def check_base(record: Mapping[str, Any], base: str) -> None:
    """Raise ConfigError unless `base` is the base that an adapter was trained on."""
    actual = fingerprint(base)
    if actual != record["fingerprint"]:
        expected = f"the weights of {record['base']} ({record['fingerprint']})"
        fix = "give the model that the adapter was trained on"
        raise ConfigError(explain("base of the adapter", f"{base} ({actual})", expected, fix))


def check_same_adapters(saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Raise ConfigError if the adapter record of any model differs from the checkpoint's."""
    for name in sorted({*saved, *present}):
        old, new = saved.get(name) or {"lora_rank": 0}, present.get(name) or {"lora_rank": 0}
        # The path of the base may differ: the fingerprint says whether it is the same.
        differing = [key for key in sorted({*old, *new} - {"base"}) if old.get(key) != new.get(key)]
        if differing:
            got, expected = (", ".join(f"{k}={x.get(k)}" for k in differing) for x in (new, old))
            fix = "give the checkpoint's options, or trainer.resume_mode=disable"
            expected = f"the checkpoint's {expected}"
            raise ConfigError(explain(f"adapter of the {name}", got, expected, fix))


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

    def adapter_record(self) -> dict[str, Any]:
        return record_of_peft_config(self.module.configs[self.role])


def build_adapted_model(
    lm: PreTrainedModel, adapters: Mapping[Role, AdapterConfig], device: torch.device,
    options: FsdpOptions,
) -> FsdpModel:  # fmt: skip
    """Build the model in the first role of `adapters`; `share_base_model` makes the others."""
    module, role = AdaptedModel(lm, adapters), next(iter(adapters))
    heads = [module.value_head] if Role.CRITIC in adapters else []
    return AdaptedFsdpModel(module, blocks(lm, lm), device, options, heads, role=role)


def share_base_model(model: FsdpModel, role: Role, options: FsdpOptions) -> FsdpModel:
    """Return the same adapted model in another role."""
    assert isinstance(model, AdaptedFsdpModel), "all weights are trained: they cannot be shared"
    return AdaptedFsdpModel(model.module, model.blocks, model.device, options, role=role)


def policy_adapter(model: FsdpModel) -> Adapter:
    """Gather the adapter that a model trains, whole on every rank; every rank must call this."""
    assert isinstance(model, AdaptedFsdpModel), "all weights are trained: there is no adapter"
    config = model.module.configs[model.role]
    return Adapter.of_parameters(config, model.full_trained_parameters(), model.role)


def policy_weights(model: FsdpModel, dtype: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and whole tensor of each weight of the policy, with its adapter merged.

    Without an adapter, weights are cast to `dtype`. With one, merged weights are float32 and the
    others in the base's dtype: the caller casts them. Every rank must run the iteration to its end.
    """
    if not isinstance(model, AdaptedFsdpModel):
        yield from model.full_parameters(prefix="lm.", dtype=getattr(torch, dtype))
        return
    adapter = policy_adapter(model)
    named = model.full_parameters(prefix="lm.", keep=lambda name: base_name(name) is not None)
    yield from adapter.merge((str(base_name(name)), tensor) for name, tensor in named)


def base_name(name: str) -> str | None:
    """Return the name that an adapted `lm`'s parameter has in the base; None for an adapter's."""
    # For example, `layers.0.q_proj.base_layer.weight` gives `layers.0.q_proj.weight`.
    return None if ".lora_" in name else name.replace(".base_layer.", ".")
