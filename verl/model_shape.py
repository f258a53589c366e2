"""The sizes of a model's tensors, read off the model built without storage: any dense decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from verl.config import ALL_LINEAR
from verl.errors import ModelError
from verl.model_files import model_errors
from verl.remote_code import trusts_remote_code
from verl.training.models import blocks

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Entries of a config.json, one of which a mixture of experts has."""


@dataclass(frozen=True)
class Linear:
    """One linear layer of a block."""

    name: str
    inputs: int
    outputs: int


@dataclass(frozen=True)
class ModelShape:
    """A decoder of `layers` blocks between an embedding and an output head."""

    config: PretrainedConfig = field(compare=False, repr=False)
    """As transformers reads it, to build the model again."""
    hidden: int
    layers: int
    vocab: int
    query_size: int
    """Values of all query heads of a token."""
    kv_heads: int
    head_dim: int
    linears: tuple[Linear, ...]
    """Of all blocks."""
    block_tensors: tuple[int, ...]
    """Values of each parameter in the blocks."""
    root_tensors: tuple[int, ...]
    """Values of each parameter outside of them, without an output head that is not tied."""
    head_tensors: tuple[int, ...]
    """Values of the output head; empty where it is the embedding."""
    last_products: int
    """Weights of the last linear layer of each block, added up."""

    @classmethod
    def of(cls, config: PretrainedConfig) -> ModelShape:
        """The shape of the model that transformers builds of `config`."""
        with torch.device("meta"):  # where trust is left open, transformers asks at the terminal
            lm: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        found = blocks(lm, lm)
        parts = [[(name.rpartition(".")[2], m) for name, m in block.named_modules()
                  if isinstance(m, nn.Linear)] for block in found]  # fmt: skip
        inside = {id(p): p.numel() for block in found for p in block.parameters()}
        embedding, head = lm.get_input_embeddings().weight, lm.get_output_embeddings().weight
        outside = [p for p in lm.parameters() if id(p) not in inside and p is not head]
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(
            config,
            hidden=config.hidden_size,
            layers=len(parts),
            vocab=config.vocab_size,
            query_size=heads * head_dim,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=head_dim,
            linears=tuple(Linear(n, m.in_features, m.out_features) for p in parts for n, m in p),
            block_tensors=tuple(inside.values()),
            root_tensors=tuple(p.numel() for p in (*outside, *[head] * (head is embedding))),
            head_tensors=() if head is embedding else (head.numel(),),
            last_products=sum(part[-1][1].weight.numel() for part in parts),
        )

    @property
    def linear_weights(self) -> int:
        """Values of the linear layers' matrices in all blocks, without biases."""
        return sum(linear.inputs * linear.outputs for linear in self.linears)

    @property
    def widest(self) -> int:
        """Outputs of the widest linear layer of a block."""
        return max(linear.outputs for linear in self.linears)

    @property
    def block(self) -> int:
        """Parameters of one block."""
        return sum(self.block_tensors) // self.layers

    def tensors(self, with_head: bool = True) -> tuple[int, ...]:
        """Values of every tensor; a critic has no output head, and a tied one is counted once."""
        return self.block_tensors + self.root_tensors + (self.head_tensors if with_head else ())

    def root(self, with_head: bool = True) -> int:
        """Parameters outside the blocks."""
        return self.parameters(with_head) - sum(self.block_tensors)

    def parameters(self, with_head: bool = True) -> int:
        """All parameters."""
        return sum(self.tensors(with_head))

    def adapter(self, rank: int, targets: str | Sequence[str] = ALL_LINEAR) -> int:
        """Parameters of a LoRA adapter: rank · (inputs + outputs) for each target of each block."""
        names = [targets] if isinstance(targets, str) else list(targets)
        chosen = [x for x in self.linears if names == [ALL_LINEAR] or x.name in names]
        return rank * sum(x.inputs + x.outputs for x in chosen)


def read_shape(path: str) -> ModelShape | None:
    """The model in a folder or the hub's cache; None where there is no dense decoder.

    Of a mixture of experts nothing is said: a token meets some of its weights only.
    """
    try:
        with model_errors(path):
            config = AutoConfig.from_pretrained(
                path, local_files_only=True, trust_remote_code=trusts_remote_code()
            )
            is_mixture = any(getattr(config, name, None) for name in EXPERTS)
            return None if is_mixture else ModelShape.of(config)
    except ModelError:
        return None
