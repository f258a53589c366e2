"""Packed attention, compared with the models' own attention on one sequence at a time."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from verl.ext.cpu.attention import attend_short_runs
from verl.training import attention
from verl.training.attention import (
    PACKED,
    SequenceBounds,
    attend_per_run,
    fast_kernel,
    packed_attention,
)

LENGTHS = [7, 1, 12, 4]
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    ("config", "model"),
    [
        (LlamaConfig, LlamaForCausalLM),
        (Qwen2Config, Qwen2ForCausalLM),
        (functools.partial(GraniteConfig, attention_multiplier=0.9), GraniteForCausalLM),
    ],
    ids=["llama", "qwen2", "custom scale"],
)
def test_packed_logits_equal_one_by_one(
    config: Callable[..., PretrainedConfig], model: type
) -> None:
    """A token sees only the prefix of its own sequence, with the model's attention scale."""
    torch.manual_seed(0)
    plain = model(config(**SIZES, initializer_range=0.2, attn_implementation="eager")).eval()
    ids = torch.randint(0, 61, (1, sum(LENGTHS)))
    expected = torch.cat([plain(part).logits for part in ids.split(LENGTHS, dim=1)], dim=1)
    plain.set_attn_implementation(PACKED)
    bounds = SequenceBounds.of([(0, n) for n in LENGTHS], torch.device("cpu"))
    packed = plain(ids, position_ids=bounds.position_ids, bounds=bounds, use_cache=False).logits
    torch.testing.assert_close(packed, expected, rtol=1e-4, atol=1e-5)


def test_a_window_limits_what_a_token_sees() -> None:
    """Sliding-window attention equals a manual softmax over the last `window` tokens."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(9, 1, 8) for _ in range(3))
    attended = attend_per_run(q, k, v, SequenceBounds.of([(0, 9)], torch.device("cpu")), 0.5, 3)
    for t in range(9):
        seen = slice(max(0, t - 2), t + 1)
        weights = torch.softmax(0.5 * k[seen, 0] @ q[t, 0], 0)
        torch.testing.assert_close(attended[t, 0], weights @ v[seen, 0])


@pytest.mark.parametrize("window", [None, 3])
def test_a_layer_without_a_scale_has_the_default(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is 1 / sqrt(head_dim); a window is passed on to the kernel, and no window as 0."""
    calls = []
    monkeypatch.setattr(attention, "attend_per_run", lambda q, *rest: calls.append(rest) or q)
    heads = torch.zeros(1, 2, 5, 16)
    bounds = SequenceBounds.of([(0, 5)], torch.device("cpu"))
    attended, _ = packed_attention(nn.Module(), heads, heads, heads, None, None, bounds, window)
    assert attended.shape == (1, 5, 2, 16)
    assert calls[0][2:] == (bounds, 0.25, window or 0)


def test_calling_without_bounds_is_an_error() -> None:
    """The error names the missing SequenceBounds."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation=PACKED))
    with pytest.raises(AssertionError, match="SequenceBounds"):
        model(torch.zeros(1, 3, dtype=torch.int64))


def attend_by_matrix(
    query: Tensor, key: Tensor, value: Tensor, bounds: SequenceBounds, window: int,
    score_dtype: torch.dtype = torch.float64,
) -> Tensor:  # fmt: skip
    """Compute a row's attention by one float64 matrix, with scores rounded to `score_dtype`."""
    owner = [(p, r) for r, (start, end) in enumerate(bounds.spans) for p in range(start, end)]
    seen = [(p, r) for r, (_, end) in enumerate(bounds.spans) for p in range(end)]
    sees = torch.tensor([
        [ours == theirs and own - (window or own + 1) < at <= own for at, theirs in seen]
        for own, ours in owner
    ])  # fmt: skip
    q, k, v = (x.double().transpose(0, 1) for x in (query, key, value))
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    scores = (0.3 * (q @ k.mT).to(score_dtype).double()).masked_fill(~sees, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 7, 300])
@pytest.mark.parametrize("spans", [[(0, 40), (40, 300)], [(0, 9), (9, 30), (9, 11), (0, 20)]])
def test_long_and_short_runs_have_the_same_attention(
    spans: list[tuple[int, int]], window: int, dtype: torch.dtype
) -> None:
    """With either implementation, outputs and gradients are those of one matrix."""
    torch.manual_seed(0)
    bounds = SequenceBounds.of(spans, torch.device("cpu"))
    sizes = (sum(bounds.lengths), sum(bounds.num_keys), sum(bounds.num_keys))
    drawn = [
        torch.randn(size, heads, 16).to(dtype).requires_grad_()
        for size, heads in zip(sizes, (6, 2, 2), strict=True)
    ]
    upstream = torch.randn(sizes[0], 6, 16).to(dtype)
    attended = fast_kernel("cpu")(*drawn, bounds, 0.3, window)
    expected = attend_by_matrix(*drawn, bounds, window)
    pairs = zip(
        [attended, *torch.autograd.grad(attended, drawn, upstream)],
        [expected, *torch.autograd.grad(expected, drawn, upstream.double())], strict=True,
    )  # fmt: skip
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    for actual, exact in pairs:
        assert (actual.double() - exact).norm() < tolerance * exact.norm()


def test_scores_of_short_runs_are_not_rounded() -> None:
    """Large scores rounded to bfloat16 would change the weights by a hundredth.

    The setting for other matrix products of the process is restored.
    """
    torch.manual_seed(0)
    query, key, value = (4 * torch.randn(100, heads, 16).bfloat16() for heads in (6, 2, 2))
    bounds = SequenceBounds.of([(0, 100)], query.device)
    expected = attend_by_matrix(query, key, value, bounds, 0)
    rounded = attend_by_matrix(query, key, value, bounds, 0, torch.bfloat16)
    before = torch.backends.mkldnn.matmul.fp32_precision
    attended = attend_short_runs(query, key, value, bounds, 0.3, 0)
    assert torch.backends.mkldnn.matmul.fp32_precision == before
    assert (attended.double() - expected).norm() < 3e-3 * expected.norm()
    assert (rounded - expected).norm() > 1e-2 * expected.norm()
