"""A frozen base with low-rank adapters: one set of weights that answers for policy and reference.

The policy is the base with the adapter `actor`, the reference is the base alone, and the critic,
where it has an adapter too, is the base with the adapter `critic` and a value head. peft puts the
adapters in; this module decides which of them is in force, and who learns which. Outside of a model
an adapter is peft's folder, or is merged into weights.
"""

from __future__ import annotations

import copy
import enum
import hashlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from verl.config import ALL_LINEAR, AdapterConfig
from verl.errors import ConfigError, explain
from verl.training.fsdp import FsdpModel, FsdpOptions
from verl.training.models import LogProbModel, PackedInputs, blocks, build_value_head, values
from verl.training.weights import write_file

PREFIX = "base_model.model."
"""What peft and vLLM expect before the module's path in a folder's tensor names."""
PROBE_BYTES = 1 << 20


@dataclass(frozen=True)
class Adapter:
    """A trained adapter: its options and whole tensors."""

    config: LoraConfig
    tensors: Mapping[str, Tensor]
    """`<module>.lora_A.weight` (rank, in) and `<module>.lora_B.weight` (out, rank), any device."""

    @classmethod
    def of_parameters(
        cls, config: LoraConfig, parameters: Mapping[str, Tensor], name: str
    ) -> Adapter:
        """From parameters as peft names them in a model: `lm.<module>.lora_A.<name>.weight`."""
        return cls(config, {
            key.removeprefix("lm.").replace(f".{name}.weight", ".weight"): tensor
            for key, tensor in parameters.items() if ".lora_" in key
        })  # fmt: skip

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return self.config.lora_alpha / self.config.r

    def delta(self, name: str) -> Tensor | None:
        """What the adapter adds to the weight `<module>.weight`, float32; None for nothing."""
        module = name.removesuffix(".weight")
        if f"{module}.lora_A.weight" not in self.tensors:
            return None
        a, b = (self.tensors[f"{module}.lora_{side}.weight"].float() for side in "AB")
        return self.scale * (b @ a)

    def merge(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The base's weights with the adapter's share added, in float32 where there is one."""
        for name, weight in named:
            delta = self.delta(name)
            yield name, weight if delta is None else weight.float() + delta.to(weight.device)

    def write(self, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        """Write peft's folder; each file appears whole or not at all."""
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {
            PREFIX + name: tensor.detach().to("cpu", dtype).contiguous()
            for name, tensor in self.tensors.items()
        }
        write_file(directory / "adapter_model.safetensors", tensors)
        config = copy.copy(self.config)
        config.inference_mode = True
        config.target_modules = sorted(config.target_modules or ())  # a set has no order of its own
        config.save_pretrained(str(directory))

    def adapter_record(self) -> dict[str, Any]:
        """JSON for a checkpoint: the options, and which base they belong to."""
        base = str(self.config.base_model_name_or_path)
        return {
            "base": base,
            "fingerprint": fingerprint(base),
            "lora_rank": self.config.r,
            "lora_alpha": float(self.config.lora_alpha),
            "target_modules": sorted(self.config.target_modules or ()),
        }


def peft_config_of_record(record: Mapping[str, Any]) -> LoraConfig:
    """peft's form of the options that a checkpoint's record holds."""
    return LoraConfig(
        r=record["lora_rank"],
        lora_alpha=record["lora_alpha"],
        target_modules=list(record["target_modules"]),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=record["base"],
    )


def fingerprint(base: str) -> str:
    """A short hash of the weights of a model folder: sizes, and both ends of each file. A name of
    the hub has no files here and is its own fingerprint."""
    digest = hashlib.sha256()
    files = sorted(Path(base).expanduser().glob("*.safetensors"))
    if not files:
        return base
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            digest.update(file.read(PROBE_BYTES))
            file.seek(max(0, size - PROBE_BYTES))
            digest.update(file.read(PROBE_BYTES))
    return digest.hexdigest()[:16]


def check_base(record: Mapping[str, Any], base: str) -> None:
    """Refuse a base other than the one an adapter was trained on. Raises ConfigError."""
    found = fingerprint(base)
    if found != record["fingerprint"]:
        raise ConfigError(
            explain("base of the adapter", f"{base} ({found})",
                    f"the weights of {record['base']} ({record['fingerprint']})",
                    "give the model that the adapter was trained on")
        )  # fmt: skip


def check_same_adapters(saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Refuse to go on with other adapters, or over another base. Raises ConfigError."""
    for name in sorted({*saved, *present}):
        old, new = saved.get(name) or {"lora_rank": 0}, present.get(name) or {"lora_rank": 0}
        # A base that moved is the same base.
        differing = [key for key in sorted({*old, *new} - {"base"}) if old.get(key) != new.get(key)]
        if differing:
            got = ", ".join(f"{key}={new.get(key)}" for key in differing)
            wanted = ", ".join(f"{key}={old.get(key)}" for key in differing)
            raise ConfigError(
                explain(f"adapter of the {name}", got, f"the checkpoint's {wanted}",
                        "give the checkpoint's options, or trainer.resume_mode=disable")
            )  # fmt: skip


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
    return peft_config_of_record({
        "lora_rank": options.lora_rank,
        "lora_alpha": options.lora_alpha,
        "target_modules": target_names(lm, options.target_modules),
        "base": lm.config.name_or_path,
    })  # fmt: skip


class AdaptedModel(LogProbModel):
    """A frozen language model with an adapter for each of `adapters`, answering for one role.

    Adapters and the critic's value head are float32 and learn; the base keeps its dtype. New ones
    change nothing: B is 0, and so is the value head.
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

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that this role trains and saves, by name."""
        own = [f".lora_A.{self.role}.", f".lora_B.{self.role}."]
        own += ["value_head."] * (self.role is Role.CRITIC)
        return {
            name: p
            for name, p in super().trained_parameters().items()
            if any(x in name for x in own)
        }

    def adapter_record(self) -> dict[str, Any]:
        """The options and base of this role's adapter."""
        return Adapter(self.module.configs[self.role], {}).adapter_record()


def build_adapted_model(
    lm: PreTrainedModel,
    adapters: Mapping[Role, AdapterConfig],
    device: torch.device,
    options: FsdpOptions,
) -> FsdpModel:
    """Build the model of the first role of `adapters`; `share_base_model` builds the others."""
    module, role = AdaptedModel(lm, adapters), next(iter(adapters))
    heads = [module.value_head] if Role.CRITIC in adapters else []
    return AdaptedFsdpModel(module, blocks(lm, lm), device, options, heads, role=role)


def share_base_model(engine: FsdpModel, role: Role, options: FsdpOptions) -> FsdpModel:
    """An engine for another role of the same adapted model."""
    assert isinstance(engine, AdaptedFsdpModel), "all weights are trained: they cannot be shared"
    return AdaptedFsdpModel(engine.module, engine.blocks, engine.device, options, role=role)


def policy_adapter(engine: FsdpModel) -> Adapter:
    """The adapter that an engine trains, whole on every rank; every rank must call this."""
    assert isinstance(engine, AdaptedFsdpModel), "all weights are trained: there is no adapter"
    return Adapter.of_parameters(
        engine.module.configs[engine.role], engine.full_trained_parameters(), engine.role
    )


def policy_weights(engine: FsdpModel, dtype: str) -> Iterator[tuple[str, Tensor]]:
    """Name and whole tensor of each weight of the policy, its adapter merged if it has one, to be
    written as `dtype`; merged weights come in that of the sum. Every rank must run the iteration to
    its end."""
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
