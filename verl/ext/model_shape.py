"""Tensor sizes of any dense decoder, read from the model built on the meta device."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from verl.config import ALL_LINEAR
from verl.errors import ModelError
from verl.model_files import model_errors
from verl.remote_code import trusts_remote_code
from verl.training.models import blocks, trunk_of

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Config entries of which a mixture of experts has one."""


@dataclass(frozen=True)
class Linear:
    """One linear layer of a block."""

    name: str
    inputs: int
    outputs: int


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder: `layers` blocks between an embedding and an output head."""

    config: PretrainedConfig = field(compare=False, repr=False)
    """The config of transformers, for building the model again."""
    hidden: int
    layers: int
    vocab: int
    query_size: int
    """Values per token of all query heads."""
    kv_heads: int
    head_dim: int
    linears: tuple[Linear, ...]
    """Linear layers of all blocks."""
    block_tensors: tuple[int, ...]
    """Number of values of each parameter inside the blocks."""
    root_tensors: tuple[int, ...]
    """Number of values of each parameter outside the blocks, without an untied output head."""
    head_tensors: tuple[int, ...]
    """Number of values of the output head; empty if it is tied to the embedding."""
    last_linear_weights: int
    """Number of weights of the last linear layer of each block, summed over the blocks."""

    @classmethod
    def of(cls, config: PretrainedConfig) -> Self:
        """Return the shape of the model that transformers builds from `config`."""
        with torch.device("meta"):  # without trust_remote_code=False transformers asks the terminal
            lm: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        layers = blocks(trunk_of(lm), lm)
        linears = [[Linear(name.rpartition(".")[2], m.in_features, m.out_features)
                    for name, m in block.named_modules() if isinstance(m, nn.Linear)]
                   for block in layers]  # fmt: skip
        inside = {id(p): p.numel() for block in layers for p in block.parameters()}
        embedding, head = lm.get_input_embeddings().weight, lm.get_output_embeddings().weight
        outside = [p for p in lm.parameters() if id(p) not in inside and p is not head]
        is_tied = head is embedding
        text = config.get_text_config()
        heads = text.num_attention_heads
        # Of layers with different sizes, the sizes that most of them have.
        head_dim = vars(text).get("head_dim") or text.hidden_size // heads
        return cls(
            config,
            hidden=text.hidden_size,
            layers=len(layers),
            vocab=text.vocab_size,
            query_size=heads * head_dim,
            kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=head_dim,
            linears=tuple(linear for block in linears for linear in block),
            block_tensors=tuple(inside.values()),
            root_tensors=tuple(p.numel() for p in ([*outside, head] if is_tied else outside)),
            head_tensors=() if is_tied else (head.numel(),),
            last_linear_weights=sum(x.inputs * x.outputs for block in linears for x in block[-1:]),
        )

    @property
    def linear_weights(self) -> int:
        """Number of weights of the linear layers in all blocks, without biases."""
        return sum(linear.inputs * linear.outputs for linear in self.linears)

    @property
    def max_outputs(self) -> int:
        """Largest number of outputs of a linear layer in a block."""
        return max(linear.outputs for linear in self.linears)

    @property
    def block_parameters(self) -> int:
        """Number of parameters of one block."""
        return sum(self.block_tensors) // self.layers

    def tensors(self, with_head: bool = True) -> tuple[int, ...]:
        """Return the size of every tensor; a tied head is counted once. A critic has no head."""
        return self.block_tensors + self.root_tensors + (self.head_tensors if with_head else ())

    def root(self, with_head: bool = True) -> int:
        """Return the number of parameters outside the blocks."""
        return self.parameters(with_head) - sum(self.block_tensors)

    def parameters(self, with_head: bool = True) -> int:
        """Return the number of all parameters."""
        return sum(self.tensors(with_head))

    def adapter(self, rank: int, targets: str | Sequence[str] = ALL_LINEAR) -> int:
        """Return the size of a LoRA adapter: rank · (inputs + outputs) for each target layer."""
        names = [targets] if isinstance(targets, str) else list(targets)
        chosen = [x for x in self.linears if names == [ALL_LINEAR] or x.name in names]
        return rank * sum(linear.inputs + linear.outputs for linear in chosen)


def read_shape(path: str) -> ModelShape | None:
    """Read the shape of a dense decoder in a folder or the hub's cache; None for other models."""
    try:
        with model_errors(path):
            config = AutoConfig.from_pretrained(
                path, local_files_only=True, trust_remote_code=trusts_remote_code()
            )
            # Not supported, since each token uses only some of its weights.
            text = config.get_text_config()
            is_mixture = any(getattr(text, name, None) for name in EXPERTS)
            has_heads = getattr(text, "num_attention_heads", None) is not None
            shape = ModelShape.of(config) if has_heads and not is_mixture else None
            return shape if shape is None or shape.linears else None
    except ModelError:
        return None
