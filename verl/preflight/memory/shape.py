"""The sizes of a model's tensors, from the facts of its config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.config import ALL_LINEAR

KNOWN_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Architectures that are counted exactly (tests compare with transformers)."""


@dataclass(frozen=True)
class Linear:
    """One linear layer of a block."""

    name: str
    inputs: int
    outputs: int
    has_bias: bool


@dataclass(frozen=True)
class ModelShape:
    """A decoder with gated MLPs and grouped-query attention."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    is_tied: bool
    """The output head is the embedding."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    has_qk_norm: bool = False

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> ModelShape | None:
        """From the entries of config.json, defaults filled in; None for an unknown architecture."""
        kind = facts.get("model_type")
        if kind not in KNOWN_TYPES:
            return None
        heads = facts["num_attention_heads"]
        has_bias = kind in ("llama", "qwen3") and bool(facts.get("attention_bias"))
        return cls(
            hidden=facts["hidden_size"],
            layers=facts["num_hidden_layers"],
            heads=heads,
            kv_heads=facts.get("num_key_value_heads") or heads,
            head_dim=facts.get("head_dim") or facts["hidden_size"] // heads,
            intermediate=facts["intermediate_size"],
            vocab=facts["vocab_size"],
            is_tied=bool(facts.get("tie_word_embeddings")),
            qkv_bias=kind == "qwen2" or has_bias,
            out_bias=has_bias,
            mlp_bias=kind == "llama" and bool(facts.get("mlp_bias")),
            has_qk_norm=kind == "qwen3",
        )

    @property
    def query_size(self) -> int:
        """Values of all query heads of a token."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Values of all key heads of a token, and as many of all value heads."""
        return self.kv_heads * self.head_dim

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The linear layers of one block."""
        h, i, q, kv = self.hidden, self.intermediate, self.query_size, self.kv_size
        return (
            Linear("q_proj", h, q, self.qkv_bias),
            Linear("k_proj", h, kv, self.qkv_bias),
            Linear("v_proj", h, kv, self.qkv_bias),
            Linear("o_proj", q, h, self.out_bias),
            Linear("gate_proj", h, i, self.mlp_bias),
            Linear("up_proj", h, i, self.mlp_bias),
            Linear("down_proj", i, h, self.mlp_bias),
        )

    @property
    def linear_weights(self) -> int:
        """Values of the linear layers' matrices in all blocks, without biases."""
        return self.layers * sum(linear.inputs * linear.outputs for linear in self.linears)

    @property
    def block_tensors(self) -> tuple[int, ...]:
        """Values of each tensor of one block."""
        weights = [linear.inputs * linear.outputs for linear in self.linears]
        biases = [linear.outputs for linear in self.linears if linear.has_bias]
        norms = [self.hidden] * 2 + [self.head_dim] * (2 * self.has_qk_norm)
        return (*weights, *biases, *norms)

    def root_tensors(self, with_head: bool = True) -> tuple[int, ...]:
        """Values of each tensor outside the blocks; a critic has no output head."""
        table = self.vocab * self.hidden
        return (table, self.hidden) + ((table,) if with_head and not self.is_tied else ())

    @property
    def block(self) -> int:
        """Parameters of one block."""
        return sum(self.block_tensors)

    def root(self, with_head: bool = True) -> int:
        """Parameters outside the blocks."""
        return sum(self.root_tensors(with_head))

    def parameters(self, with_head: bool = True) -> int:
        """All parameters, a tied head counted once."""
        return self.layers * self.block + self.root(with_head)

    def tensors(self, with_head: bool = True) -> tuple[int, ...]:
        """Values of every tensor."""
        return self.layers * self.block_tensors + self.root_tensors(with_head)

    def adapter(self, rank: int, targets: str | Sequence[str] = ALL_LINEAR) -> int:
        """Parameters of a LoRA adapter: rank · (inputs + outputs) for each target of each block."""
        names = [targets] if isinstance(targets, str) else list(targets)
        chosen = [x for x in self.linears if names == [ALL_LINEAR] or x.name in names]
        return self.layers * rank * sum(x.inputs + x.outputs for x in chosen)
