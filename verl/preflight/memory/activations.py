"""What a packed forward and backward hold besides weights: activations and logits.

Values a token, read off the modules of transformers and `verl.training.models`; a test counts the
tensors that autograd really keeps.
"""

from __future__ import annotations

from verl.preflight.memory.needs import FLOAT
from verl.preflight.memory.shape import ModelShape
from verl.training.models import LOGITS_PER_CHUNK

LOGIT_COPIES = 4
"""Float32 tensors of a chunk's size at once: logits, log-softmax, and two for entropy or gradient.
One more where the temperature is not 1."""


def kept_by_block(shape: ModelShape, item: int) -> int:
    """Bytes a token that autograd keeps for one block computed in `item` bytes a value.

    Two norms (input in float32, its scale, normed values, their product with the weight), queries,
    keys, values, the attention's output twice (as the kernel's and as o_proj's input) with its
    float32 log-sums, and of the MLP: gate, its activation, up, and their product.
    """
    norms = 2 * ((FLOAT + 2 * item) * shape.hidden + FLOAT)
    attention = item * (3 * shape.query_size + 2 * shape.kv_size) + FLOAT * shape.heads
    return norms + attention + 4 * item * shape.intermediate


def passing_in_backward(shape: ModelShape, item: int) -> int:
    """Bytes a token of gradients that live at once while one block's MLP is differentiated."""
    return 3 * item * shape.intermediate + (2 * item + FLOAT) * shape.hidden


def passing_in_forward(shape: ModelShape, item: int) -> int:
    """Bytes a token of a block computed without gradient: residual, normed input, and the MLP's
    gate, its activation and up."""
    return item * (3 * shape.intermediate + 2 * shape.hidden)


def kept_for_backward(shape: ModelShape, tokens: int, item: int, recompute: bool) -> int:
    """Bytes of `tokens` that stay from forward to backward.

    With gradient checkpointing (`recompute`) each block keeps its input; without it, everything.
    The last norm keeps its own.
    """
    block = item * shape.hidden if recompute else kept_by_block(shape, item)
    last_norm = (FLOAT + 2 * item) * shape.hidden
    return tokens * (shape.layers * block + last_norm)


def passing_while_learning(
    shape: ModelShape, tokens: int, item: int, recompute: bool, head: int
) -> int:
    """Bytes of `tokens` that come and go: the head's (`head` bytes), or one block's backward.

    The head is done before the blocks' backward begins.
    """
    again = kept_by_block(shape, item) if recompute else 0
    return max(head, tokens * (again + passing_in_backward(shape, item)))


def passing_without_gradient(shape: ModelShape, tokens: int, item: int, head: int) -> int:
    """Bytes of `tokens` in a forward alone: one block's, or last states and the head's."""
    return max(tokens * passing_in_forward(shape, item), head + tokens * 2 * item * shape.hidden)


def logits(shape: ModelShape, tokens: int, item: int, has_temperature: bool) -> int:
    """Bytes of the logits of one chunk; LOGITS_PER_CHUNK bounds them whatever `tokens` is."""
    values = min(tokens * shape.vocab, LOGITS_PER_CHUNK)
    return values * (item + FLOAT * (LOGIT_COPIES + has_temperature))
