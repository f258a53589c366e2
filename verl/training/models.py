"""What runs inside FSDP: a transformer and a head that answers for chosen tokens only.

The head lives inside the wrapped module, since FSDP gathers its weights for the module's forward
only. Prompt and observation tokens never reach a head, so they cost no logits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel

from verl.model_files import check_loading_report, model_errors, quiet_transformers
from verl.packing import Packing
from verl.remote_code import trusts_remote_code
from verl.training.attention import PACKED, SequenceBounds, Span
from verl.training.devices import to_device
from verl.training.sequence_parallel import SequenceParallelGroup, TargetGather
from verl.types import TokenBatch

LOGITS_PER_CHUNK = 1 << 26
"""Logits held at once (256 MiB in float32), whatever the number of tokens."""


@dataclass(frozen=True)
class PackedInputs:
    """One forward: the tokens of all sequences in a row, and the tokens that are asked for. The
    ranks of a sequence-parallel group have the same batch, and each computes a slice of the row.

    Example: of P P A B and P P C, which share a prompt, the row holds P P A B C; A and C are asked
    of its second token.
    """

    input_ids: Tensor
    """(1, num_tokens) the tokens that are computed here."""
    bounds: SequenceBounds
    """Of the whole row."""
    target_positions: Tensor
    """(num_targets,) where in the batch the tokens asked for are, never a sequence's first; these
    stay on the host."""
    targets: Tensor
    """(num_answers,) ids of the targets computed on this rank; without a group, of all."""
    before_targets: Tensor
    """(num_answers,) where in `input_ids` is the token before each of them."""
    target_gather: TargetGather | None = None
    """Collects the results of the group's ranks; None where this rank computes all targets."""

    @classmethod
    def of(
        cls,
        batch: TokenBatch,
        mask: Tensor,
        device: torch.device,
        sp_group: SequenceParallelGroup | None = None,
    ) -> PackedInputs:
        """Pack `batch`, asking for tokens where `mask` (num_tokens,) is True. A batch without
        tokens becomes two that are not asked for: its rank still takes part in collectives."""
        if batch.num_tokens:
            starts = batch.offsets[:-1]
            is_target = mask.bool().clone()
            is_target[starts[batch.lengths > 0]] = False
            positions, ids = is_target.nonzero()[:, 0], batch.tokens["input_ids"]
            spans, computed, row_of = laid_out(Packing.of(batch), starts.tolist(), batch.num_tokens)
            row, targets, before = ids[computed], ids[positions], row_of[positions - 1]
        else:
            spans, row = [(0, 2)], torch.zeros(2, dtype=torch.int64)
            positions = targets = before = row[:0]
        bounds, gather, own = SequenceBounds.of(spans, device, sp_group), None, row[None]
        if sp_group is not None:
            size, own = sp_group.slice_size(len(row)), sp_group.local_slice(own)
            gather, mine = TargetGather.of(sp_group, before // size, device)
            targets, before = targets[mine], before[mine] - size * sp_group.rank
        return cls(
            to_device(own, device),
            bounds,
            positions,
            to_device(targets, device),
            to_device(before, device),
            gather,
        )

    def gathered(self, *columns: Tensor) -> tuple[Tensor, ...]:
        """Of columns (num_answers,) those of all tokens that are asked for, (num_targets,)."""
        return columns if self.target_gather is None else self.target_gather.gather(*columns)


def laid_out(
    packing: Packing, starts: Sequence[int], num_tokens: int
) -> tuple[list[Span], Tensor, Tensor]:
    """How sequences that begin at `starts` of a flat batch go into a row.

    Returns the runs of the row, the flat position of each of its tokens, (num_computed,), and where
    in the row each token of the batch is, (num_tokens,).
    """
    spans: list[Span] = []
    places: list[Tensor] = []
    families = packing.families(range(len(packing.lengths)))
    for family in families:
        first, shared = starts[family.members[0]], family.shared
        if shared:
            spans.append((0, shared))
            places.append(torch.arange(first, first + shared))
        for sequence, length in zip(family.members, family.lengths, strict=True):
            if length:
                spans.append((shared, length))
                places.append(torch.arange(starts[sequence] + shared, starts[sequence] + length))
    computed = torch.cat(places)
    row_of = torch.empty(num_tokens, dtype=torch.int64)
    row_of[computed] = torch.arange(len(computed))
    for family in families:
        first, *others = (starts[i] for i in family.members)
        for start in others:
            row_of[start : start + family.shared] = row_of[first : first + family.shared]
    return spans, computed, row_of


def load_causal_lm(
    path: str, dtype: torch.dtype = torch.float32, needs_head: bool = True,
    attention: str | None = PACKED,
) -> PreTrainedModel:  # fmt: skip
    """A causal language model on the CPU, its attention packed or, with None, transformers' own.

    Raises ModelError when `path` is not there, holds no such model, or its weights are not those
    of the model (`check_loading_report`); their values are looked at where they are read.
    """
    with model_errors(path, "weights"), quiet_transformers():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=attention, output_loading_info=True,
            ignore_mismatched_sizes=True, trust_remote_code=trusts_remote_code(),
        )  # fmt: skip
        lm: PreTrainedModel = loaded[0]
        check_loading_report(lm, loaded[1], needs_head)
    return lm


def states(trunk: nn.Module, inputs: PackedInputs) -> Tensor:
    """The trunk's state from which each target token is predicted, (num_answers, hidden)."""
    hidden: Tensor = trunk(
        input_ids=inputs.input_ids,
        position_ids=inputs.bounds.position_ids,
        use_cache=False,
        bounds=inputs.bounds,
    ).last_hidden_state
    return hidden[0, inputs.before_targets]


class LogProbModel(nn.Module):
    """A policy: log-prob and entropy of target tokens."""

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        self.lm = lm

    def forward(
        self, inputs: PackedInputs, temperature: float, learn_entropy: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies (with a gradient if `learn_entropy`) in nats at `temperature`,
        (num_targets,) float32 each.

        Logits exist for a chunk of tokens at a time, forward and backward: the last one, where
        backward begins, is kept, and those before it are computed again.
        """
        hidden, targets = states(self.lm.get_decoder(), inputs), inputs.targets
        size = max(1, LOGITS_PER_CHUNK // self.lm.config.vocab_size)
        num_whole, rest = divmod(len(targets), size)
        sizes = [rest] * (rest > 0 or not num_whole) + [size] * num_whole
        *before, last = zip(hidden.split(sizes), targets.split(sizes), strict=True)
        again = functools.partial(checkpoint, self._chunk, use_reentrant=False)
        chunks = [again(*one, temperature, learn_entropy) for one in before]
        chunks.append(self._chunk(*last, temperature, learn_entropy))
        log_probs, entropies = inputs.gathered(*map(torch.cat, zip(*chunks, strict=True)))
        return log_probs, entropies

    def _chunk(
        self, hidden: Tensor, targets: Tensor, temperature: float, learn_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        logits = self.lm.get_output_embeddings()(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if temperature != 1.0:
            logits = logits / temperature
        log_p = torch.log_softmax(logits, dim=-1)
        chosen = log_p.gather(-1, targets[:, None])[:, 0]
        # Last, so that a backward without learn_entropy stops recomputing before it.
        source = log_p if learn_entropy else log_p.detach()
        return chosen, -(source.exp() * source).sum(-1)


class ValueModel(nn.Module):
    """A critic: the value of the state before each target token."""

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        self.trunk = lm.get_decoder()
        self.value_head = build_value_head(lm)

    def forward(self, inputs: PackedInputs) -> Tensor:
        """Values, (num_targets,) float32; 0 before the first update."""
        return values(self.trunk, self.value_head, inputs)


def build_value_head(lm: PreTrainedModel) -> nn.Linear:
    """From a state to its value, which is 0 for now."""
    head = nn.Linear(lm.config.hidden_size, 1, bias=False)
    nn.init.zeros_(head.weight)
    return head


def values(trunk: nn.Module, value_head: nn.Module, inputs: PackedInputs) -> Tensor:
    """The value of the state before each target token, (num_targets,) float32."""
    found: Tensor = value_head(states(trunk, inputs))
    found = found.to(torch.promote_types(found.dtype, torch.float32)).sum(-1)
    return inputs.gathered(found)[0]


def blocks(module: nn.Module, lm: PreTrainedModel) -> list[nn.Module]:
    """The transformer blocks of `module`, by the class names that the model declares."""
    names = set(lm._no_split_modules or ())
    found = [m for m in module.modules() if type(m).__name__ in names]
    assert found, f"{type(lm).__name__} declares no blocks; expected _no_split_modules to name some"
    return found
