"""The modules that FSDP shards: a transformer, and a head that computes target tokens only.

The head is part of the sharded module, since FSDP gathers its weights only for the module's
forward. Prompt and observation tokens never reach a head, so they cost no logits. The head is
called by the model's own forward, which may scale or cap the logits.
"""

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from verl import plugins
from verl.batch import TokenBatch
from verl.packing import Packing, as_rows
from verl.training.attention import SequenceBounds, Span
from verl.training.devices import to_device
from verl.training.mixers import current_row

LOGITS_PER_CHUNK = 1 << 26
"""Upper limit of the logits in memory at once (256 MiB in float32), for any number of tokens."""
RECOMPUTATIONS = {"selective": "verl.ext.recompute:contexts"}
"""What decides which activations are recomputed in backward, where not all of them are."""


@dataclass(frozen=True)
class PackedInputs:
    """Inputs of one forward: the tokens of all sequences in one row, and the target tokens.

    Example: for P P A B and P P C, which share a prompt, the row is P P A B C; A and C are both
    predicted from its second token.
    """

    input_ids: Tensor
    """(1, num_tokens) ids of the row's tokens."""
    bounds: SequenceBounds
    target_positions: Tensor
    """(num_targets,) on the host: batch positions of all targets, never a sequence's first."""
    targets: Tensor
    """(num_targets,) ids of the targets."""
    before_targets: Tensor
    """(num_targets,) positions in `input_ids` of the tokens before the targets."""

    @classmethod
    def of(cls, batch: TokenBatch, mask: Tensor, device: torch.device) -> Self:
        """Pack `batch`, with the tokens where `mask` (num_tokens,) is True as targets.

        A batch without tokens becomes a row of two tokens without targets, because its rank must
        still take part in collectives.
        """
        if batch.num_tokens:
            batch = as_rows(batch)
            starts = batch.offsets[:-1]
            is_target = mask.bool().clone()
            is_target[starts[batch.lengths > 0]] = False
            positions = is_target.nonzero()[:, 0]
            ids = batch.tokens["input_ids"]
            spans, computed, index_in_row = lay_out_row(
                Packing.of(batch), starts.tolist(), batch.num_tokens
            )
            row, targets, before = ids[computed], ids[positions], index_in_row[positions - 1]
        else:
            spans, row = [(0, 2)], torch.zeros(2, dtype=torch.int64)
            positions = targets = before = row[:0]
        bounds = SequenceBounds.of(spans, device)
        input_ids, targets, before = (to_device(x, device) for x in (row[None], targets, before))
        return cls(input_ids, bounds, positions, targets, before)


def lay_out_row(
    packing: Packing, starts: Sequence[int], num_tokens: int
) -> tuple[list[Span], Tensor, Tensor]:
    """Lay out the sequences of a flat batch, which begin at `starts`, in a packed row.

    Returns the runs of the row, the flat position of each of its tokens, (num_computed,), and the
    index in the row of each token of the batch, (num_tokens,).
    """
    spans: list[Span] = []
    flat_positions: list[Tensor] = []
    index_in_row = torch.empty(num_tokens, dtype=torch.int64)
    num_computed = 0
    groups = packing.prefix_groups(range(len(packing.lengths)))
    for run in itertools.chain.from_iterable(group.runs for group in groups):
        spans.append((run.start, run.end))
        own = torch.arange(run.start, run.end)
        flat_positions.append(starts[run.members[0]] + own)
        for member in run.members:
            index_in_row[starts[member] + own] = own + (num_computed - run.start)
        num_computed += len(own)
    return spans, torch.cat(flat_positions), index_in_row


def trunk_of(lm: PreTrainedModel) -> nn.Module:
    """Return the part of a language model that computes hidden states."""
    decoder: nn.Module = lm.get_decoder()
    return lm.base_model if decoder is lm else decoder


def target_hidden_states(trunk: nn.Module, inputs: PackedInputs) -> Tensor:
    """Return the hidden state before each target, (num_targets, hidden)."""
    current_row(trunk).bounds = inputs.bounds
    hidden: Tensor = trunk(
        input_ids=inputs.input_ids,
        position_ids=inputs.bounds.position_ids,
        use_cache=False,
        bounds=inputs.bounds,
    ).last_hidden_state
    return hidden[0, inputs.before_targets]


class LogProbModel(nn.Module):
    """A policy: computes log-probs and entropies of target tokens."""

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        self.lm = lm

    def forward(
        self, inputs: PackedInputs, temperature: float, learn_entropy: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Compute log-probs and entropies, in nats, at `temperature`: (num_targets,) float32 each.

        Entropies have a gradient if `learn_entropy`. Only one chunk of logits is in memory at a
        time, in forward and backward: the last chunk, where backward begins, is kept, and the
        chunks before it are recomputed.
        """
        hidden, targets = target_hidden_states(trunk_of(self.lm), inputs), inputs.targets
        size = max(1, LOGITS_PER_CHUNK // self.lm.config.get_text_config().vocab_size)
        num_whole, rest = divmod(len(targets), size)
        sizes = [size] * num_whole
        if rest or not num_whole:
            sizes.insert(0, rest)
        *first, last = zip(hidden.split(sizes), targets.split(sizes), strict=True)
        recomputed = functools.partial(checkpoint, self._chunk, use_reentrant=False)
        outputs = [recomputed(*chunk, temperature, learn_entropy) for chunk in first]
        outputs.append(self._chunk(*last, temperature, learn_entropy))
        log_probs, entropies = map(torch.cat, zip(*outputs, strict=True))
        return log_probs, entropies

    def _chunk(
        self, hidden: Tensor, targets: Tensor, temperature: float, learn_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        return token_log_probs(logits_of(self.lm, hidden), targets, temperature, learn_entropy)


def token_log_probs(
    logits: Tensor, targets: Tensor, temperature: float, learn_entropy: bool
) -> tuple[Tensor, Tensor]:
    """Compute log-probs of `targets` and entropies, (num_targets,) each, at `temperature`.

    `logits` are (num_targets, vocabulary). Entropies have a gradient if `learn_entropy`.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature != 1.0:
        logits = logits / temperature
    log_p = torch.log_softmax(logits, dim=-1)
    chosen = log_p.gather(-1, targets[:, None])[:, 0]
    # Entropy last, so that a backward without learn_entropy stops recomputing before it.
    source = log_p if learn_entropy else log_p.detach()
    return chosen, -(source.exp() * source).sum(-1)


class TrunkOutput(BaseModelOutputWithPast):
    """What a trunk returns to its wrapper: a hidden state, and None for all other results."""

    def __getattr__(self, name: str) -> None:
        return None


def logits_of(lm: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Return the logits, (num_tokens, vocabulary), of the trunk's `hidden` (num_tokens, hidden).

    They come from the model's own forward, in which the trunk returns `hidden`: some families scale
    or cap what the head computes.
    """
    with returning(hidden[None], path_to_trunk(lm)):
        logits: Tensor = lm(inputs_embeds=hidden[None], use_cache=False).logits
    return logits[0]


def path_to_trunk(lm: PreTrainedModel) -> list[nn.Module]:
    """Return the trunk and the modules around it, any of which the model's forward may call."""
    trunk, path, module = trunk_of(lm), list[nn.Module](), cast(nn.Module, lm)
    while module is not trunk:
        module = next(c for c in module.children() if any(m is trunk for m in c.modules()))
        path.append(module)
    return path


@contextlib.contextmanager
def returning(hidden: Tensor, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let the forward of each of `modules` return `hidden` instead of computing it."""

    def forward(*_: Any, **__: Any) -> TrunkOutput:
        return TrunkOutput(last_hidden_state=hidden)  # type: ignore[arg-type]

    before = [vars(module).get("forward") for module in modules]
    for module in modules:
        vars(module)["forward"] = forward
    try:
        yield
    finally:
        for module, own in zip(modules, before, strict=True):
            vars(module)["forward"] = own
            if own is None:
                del vars(module)["forward"]


class ValueModel(nn.Module):
    """A critic: computes the value of the state before each target token."""

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        self.trunk = trunk_of(lm)
        self.value_head = build_value_head(lm)

    def forward(self, inputs: PackedInputs) -> Tensor:
        """Compute the values, (num_targets,) float32; they are 0 before the first update."""
        return target_values(self.trunk, self.value_head, inputs)


def build_value_head(lm: PreTrainedModel) -> nn.Linear:
    """Build the layer from a hidden state to its value, with weights of 0."""
    head = nn.Linear(lm.get_output_embeddings().weight.shape[-1], 1, bias=False)
    nn.init.zeros_(head.weight)
    return head


def target_values(trunk: nn.Module, value_head: nn.Module, inputs: PackedInputs) -> Tensor:
    """Compute the value of the state before each target token, (num_targets,) float32."""
    values: Tensor = value_head(target_hidden_states(trunk, inputs))
    return values.to(torch.promote_types(values.dtype, torch.float32)).sum(-1)


def recompute(lm: PreTrainedModel, mode: bool | str | None) -> None:
    """Let backward recompute all activations of a block (True), none, or what `mode` names.

    Raises ConfigError for a mode whose file was deleted.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    if isinstance(mode, str):
        key = "actor_rollout_ref.model.enable_gradient_checkpointing"
        options["context_fn"] = plugins.load(key, mode, RECOMPUTATIONS)
    if mode:
        lm.gradient_checkpointing_enable(options)


def blocks(module: nn.Module, lm: PreTrainedModel) -> list[nn.Module]:
    """Return the transformer blocks of `module`, by the class names that the model declares."""
    names = set(lm._no_split_modules or ())
    modules = [m for m in module.modules() if type(m).__name__ in names]
    assert modules, f"{type(lm).__name__} has no blocks; expected _no_split_modules to name some"
    return modules
