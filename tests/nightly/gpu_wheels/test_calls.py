"""Every call that we make of torch, Ray, transformers, peft and vLLM is valid there."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.nightly.gpu_wheels.wheels import ROOT, WHEELS, run

pytestmark = pytest.mark.gpu_wheels
COUNTED_ON = (
    "self._llm.generate", "self._llm.collective_rpc", "self._llm.sleep", "self._llm.wake_up",
    "self._llm.add_lora", "self._llm.remove_lora", "self._llm.reset_prefix_cache",
    "LoRARequest", "self._vllm.SamplingParams", "self.reload_weights", "varlen_attn",
    "fully_shard", "ActorHost.options", "placement_group", "dist.init_process_group",
)  # fmt: skip


@pytest.mark.parametrize("wheel", WHEELS)
def test_every_call_binds(wheel: str) -> None:
    """By name and parameters, in the environments of all wheels; none is overlooked."""
    report = run(wheel, "calls.py", str(ROOT))
    assert report["wrong"] == []
    bound = Counter(report["bound"])
    assert [name for name in COUNTED_ON if not bound[name]] == []
