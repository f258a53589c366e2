"""Activations are what autograd keeps."""

import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl.preflight.memory.activations import kept_by_block, logits
from verl.preflight.memory.shape import ModelShape
from verl.training.attention import PACKED, SequenceBounds
from verl.training.models import LOGITS_PER_CHUNK

LENGTHS = [40, 24]


def kept(layers: int, dtype: torch.dtype, recompute: bool) -> tuple[int, ModelShape]:
    """Bytes of the tensors that autograd saves in a packed forward, weights left out."""
    config = Qwen2Config(
        vocab_size=200, hidden_size=64, intermediate_size=160, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, attn_implementation=PACKED,
    )  # fmt: skip
    lm = Qwen2ForCausalLM(config).to(dtype).train()
    if recompute:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    weights = {p.untyped_storage().data_ptr() for p in lm.parameters()}
    held: list[Tensor] = []
    bounds = SequenceBounds.of(LENGTHS, torch.device("cpu"))
    ids = torch.arange(sum(LENGTHS))[None]
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: held.append(x) or x, lambda x: x
    ):  # the list keeps them alive, so that no address is used twice
        trunk = lm.get_decoder()
        out = trunk(input_ids=ids, position_ids=bounds.position_ids, use_cache=False, bounds=bounds)
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}
    assert out.last_hidden_state.requires_grad
    shape = ModelShape.of(config.to_dict())
    assert shape is not None
    return sum(n for address, n in storages.items() if address not in weights), shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_keeps_what_the_formula_says(dtype: torch.dtype) -> None:
    """Two blocks more keep exactly twice the formula's bytes a token."""
    more, shape = kept(3, dtype, recompute=False)
    fewer, _ = kept(1, dtype, recompute=False)
    assert more - fewer == 2 * sum(LENGTHS) * kept_by_block(shape, dtype.itemsize)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_recomputed_block_keeps_its_input(dtype: torch.dtype) -> None:
    """With gradient checkpointing a block costs one hidden state a token."""
    more, shape = kept(3, dtype, recompute=True)
    fewer, _ = kept(1, dtype, recompute=True)
    assert more - fewer == 2 * sum(LENGTHS) * dtype.itemsize * shape.hidden


def test_logits_stop_growing_at_a_chunk() -> None:
    """However many tokens are asked for."""
    shape = ModelShape(64, 2, 4, 2, 16, 160, vocab=1 << 16, is_tied=True)
    full = LOGITS_PER_CHUNK // shape.vocab
    assert logits(shape, full, 2, False) == logits(shape, 100 * full, 2, False)
    assert logits(shape, full // 2, 2, False) * 2 == logits(shape, full, 2, False)
    assert logits(shape, 10, 2, True) > logits(shape, 10, 2, False)
