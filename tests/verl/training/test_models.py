"""A group's prompt computed once, compared with every sequence computed separately."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tests.core.batches import make_batch, make_groups, make_tree
from tests.verl.training.ranks import VOCAB
from verl.batch import ROW_STARTS, TokenBatch
from verl.config.policy import SELECTIVE
from verl.errors import ConfigError
from verl.packing import PREFIXES, common_prefixes
from verl.training import models
from verl.training.attention import PACKED
from verl.training.models import LogProbModel, PackedInputs, ValueModel, recompute

GROUPS = [(7, [5, 1, 12]), (4, [6]), (9, [3, 8, 2, 2]), (1, [4, 4])]
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2,
}  # fmt: skip
ARCHITECTURES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "window of 6": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=6)),
}


def build(name: str, dtype: torch.dtype) -> PreTrainedModel:
    """Build a random model that computes entirely in `dtype`; transformers' norms use float32."""
    torch.manual_seed(0)
    lm = ARCHITECTURES[name]()
    lm.set_attn_implementation(PACKED)
    for part in list(lm.modules()):
        for label, norm in list(part.named_children()):
            if type(norm).__name__.endswith("RMSNorm"):
                setattr(part, label, nn.RMSNorm(SIZES["hidden_size"], norm.variance_epsilon))
    return lm.to(dtype).train()


def outputs_and_gradient(module: nn.Module, batch: TokenBatch, *arguments: Any) -> list[Tensor]:
    """Return the module's outputs for the policy's tokens, and the gradient of all weights."""
    inputs = PackedInputs.of(batch, batch.tokens["policy_mask"], torch.device("cpu"))
    result = module(inputs, *arguments)
    outputs = result if isinstance(result, tuple) else (result,)
    weights = torch.linspace(-1, 2, len(outputs[0]), dtype=outputs[0].dtype)
    loss = sum((output * weights).sum() for output in outputs)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(loss, trained)
    return [*outputs, torch.cat([gradient.flatten() for gradient in gradients])]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("kind", ["policy", "critic", "adapter"])
@pytest.mark.parametrize("is_tree", [False, True], ids=["prompts", "tree"])
def test_what_is_shared_changes_no_gradient(
    name: str, kind: str, is_tree: bool, dtype: torch.dtype, bound: float
) -> None:
    """Log-probs, entropies, values and the gradient of each weight are equal up to rounding.

    In the tree, sampled tokens and documents are shared, each with a weight of its own.
    """
    lm, batch = build(name, dtype), make_tree() if is_tree else make_groups(GROUPS)
    module, arguments = LogProbModel(lm), (0.7, True)
    if kind == "adapter":
        config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        inject_adapter_in_model(config, lm).to(dtype)
    if kind == "critic":
        module, arguments = ValueModel(lm), ()
        nn.init.normal_(module.value_head.weight)
        module.value_head.to(dtype)
    apart = outputs_and_gradient(module, batch, *arguments)
    batch.columns[PREFIXES] = common_prefixes(batch)
    together = outputs_and_gradient(module, batch, *arguments)
    recomputed = []
    for mode in (True, SELECTIVE):
        recompute(lm, mode)
        recomputed.append(outputs_and_gradient(module, batch, *arguments))
    for expected, *actual in zip(apart, together, *recomputed, strict=True):
        assert expected.any()
        for tensor in actual:
            assert (tensor - expected).norm() <= bound * expected.norm()


@pytest.mark.parametrize("is_shared", [False, True], ids=["apart", "shared"])
def test_rows_of_one_episode_are_sequences_of_their_own(is_shared: bool) -> None:
    """Log-probs and gradient of episodes of two rows are those of the rows apart."""
    flat = make_groups([(7, [5, 1, 12]), (9, [3, 8, 4])]).select([0, 3, 1, 4, 2, 5])
    episodes = TokenBatch(
        flat.offsets[::2], flat.tokens | {ROW_STARTS: torch.zeros(flat.num_tokens).bool()},
        columns={"group": ["g0"] * 3},
    )  # fmt: skip
    episodes.tokens[ROW_STARTS][flat.offsets[1::2]] = True
    if is_shared:
        episodes.columns[PREFIXES] = common_prefixes(episodes)
        assert [prefix[-1][1] for prefix in episodes.columns[PREFIXES]] == [7, 7, 7]
    module = LogProbModel(build(next(iter(ARCHITECTURES)), torch.float64))
    expected = outputs_and_gradient(module, flat, 0.7, True)
    for apart, together in zip(expected, outputs_and_gradient(module, episodes, 0.7, True),
                               strict=True):  # fmt: skip
        assert apart.any() and (together - apart).norm() <= 1e-12 * apart.norm()


def test_a_row_holds_a_prompt_once() -> None:
    """It has prompts, the responses after them, and the token before each target."""
    batch = make_groups([(2, [2, 1]), (3, [2])])
    batch.columns[PREFIXES] = common_prefixes(batch)
    a, b, c, d, _, _, e, f, g, h, i, j = batch.tokens["input_ids"].tolist()
    inputs = PackedInputs.of(batch, torch.ones(12), torch.device("cpu"))
    assert inputs.input_ids[0].tolist() == [a, b, c, d, e, f, g, h, i, j]
    assert inputs.bounds.spans == ((0, 2), (2, 4), (2, 3), (0, 5))
    assert inputs.bounds.position_ids[0].tolist() == [0, 1, 2, 3, 2, 0, 1, 2, 3, 4]
    assert inputs.target_positions.tolist() == [1, 2, 3, 5, 6, 8, 9, 10, 11]
    assert inputs.targets.tolist() == [b, c, d, b, e, g, h, i, j]
    assert inputs.before_targets.tolist() == [0, 1, 2, 0, 1, 5, 6, 7, 8]


def test_a_row_holds_what_some_have_in_common_once() -> None:
    """A run follows the last one that ends where it starts, over those that other runs follow."""
    batch = make_tree()
    batch.columns[PREFIXES] = common_prefixes(batch)
    inputs = PackedInputs.of(batch, torch.ones(batch.num_tokens), torch.device("cpu"))
    paths = inputs.bounds.paths
    assert paths == [
        [0], [0, 1], [0, 2], [0, 2, 3], [0, 2, 3, 4], [0, 2, 3, 5], [0, 2, 6], [0, 2, 6, 7],
        [0, 2, 6, 8], [9], [9, 10], [9, 11],
    ]  # fmt: skip
    row, spans = inputs.input_ids[0].split(inputs.bounds.lengths), inputs.bounds.spans
    leaves = (1, 4, 5, 7, 8, 10, 11)
    for ids, leaf in zip(batch.sequences("input_ids"), leaves, strict=True):
        assert torch.equal(ids, torch.cat([row[number] for number in paths[leaf]]))
        assert len(ids) == spans[leaf][1]


def test_empty_sequences_take_no_space() -> None:
    """Nor do they shift the targets of others."""
    full, sparse = make_batch([4, 3]), make_batch([4, 3])
    sparse.offsets = torch.tensor([0, 0, 4, 4, 7, 7])
    sparse.columns["group"] = ["g"] * 5
    one, other = (PackedInputs.of(b, torch.ones(7), torch.device("cpu")) for b in (full, sparse))
    assert one.bounds.spans == other.bounds.spans == ((0, 4), (0, 3))
    assert torch.equal(one.before_targets, other.before_targets)
    assert one.target_positions.tolist() == other.target_positions.tolist() == [1, 2, 3, 5, 6]


def test_a_recomputation_whose_file_was_deleted_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named, and activations are not kept silently."""
    monkeypatch.setitem(models.RECOMPUTATIONS, "selective", "verl.ext.deleted:contexts")
    with pytest.raises(ConfigError, match=r"verl/ext/deleted"):
        recompute(build("llama", torch.float32), SELECTIVE)
