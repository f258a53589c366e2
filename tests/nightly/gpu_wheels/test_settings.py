"""How vLLM's GPU wheels resolve our options on each kind of card."""

from __future__ import annotations

from typing import Any

import pytest

from tests.nightly.gpu_wheels.wheels import (
    CARDS,
    CASES,
    NEW,
    ROLLOUT,
    SEQS,
    VARIANTS,
    WHEELS,
    settings,
)

pytestmark = pytest.mark.gpu_wheels
RUNNING = [
    (wheel, *case)
    for wheel in WHEELS
    for case in CASES
    if case[:2] != ("T4", "bfloat16") and (wheel != "cuda12" or case[0] in NEW)
]
"""The wheels of CUDA 12 are installed for new cards only."""


@pytest.mark.parametrize(("wheel", "card", "dtype", "variant"), RUNNING)
def test_settings_are_as_expected(wheel: str, card: str, dtype: str, variant: str) -> None:
    """Steps and dialogues as estimated, graphs, sleep mode, and processes where there are ranks."""
    resolved = settings(wheel)[card, dtype, variant]
    if (wheel, variant) == ("cuda12", "fp8"):
        assert "Unknown quantization method" in resolved["error"]
        return
    assert "error" not in resolved
    wanted: dict[str, Any] = VARIANTS[variant]
    is_new = CARDS[card]["capability"] >= [8, 0]
    is_alone = "trainer.deterministic" in wanted and not is_new
    size = wanted.get(f"{ROLLOUT}.tensor_model_parallel_size", 1)
    expected = {
        "dtype": dtype,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 1 if is_alone else SEQS,
        "chunked_prefill": True,
        "sleep_mode": True,
        "prefix_caching": "trainer.deterministic" not in wanted,
        "batch_invariant": "trainer.deterministic" in wanted and is_new,
        "custom_all_reduce": not ("trainer.deterministic" in wanted and is_new),
        "tensor_parallel": size,
        "executor": "uni" if size == 1 else "mp",
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        "lora_rank": wanted.get("actor_rollout_ref.model.lora_rank", 0),
        "quantization": "fp8_per_tensor" if variant == "fp8" else "None",
        "kv_cache": "fp8" if variant == "fp8" else "auto",
        "speculation": "ngram" if variant == "ngram" else "none",
        "attention": "FLASH_ATTN" if is_new and dtype != "float32" else "TRITON_ATTN",
    }
    assert {key: resolved[key] for key in expected} == expected


@pytest.mark.parametrize("wheel", WHEELS)
def test_limits_of_old_cards(wheel: str) -> None:
    """No bfloat16 below capability 8.0; torch has kernels for a V100 only with CUDA 12."""
    resolved = settings(wheel)
    assert "Bfloat16 is only supported" in resolved["T4", "bfloat16", "plain"]["error"]
    has_kernels = {
        card: answer["kernels"] for (card, *_), answer in resolved.items() if "kernels" in answer
    }
    assert has_kernels == {card: card != "V100" or wheel == "cuda12" for card in CARDS}
