"""What the installed build of vLLM can do; `test_engines.py` has the arguments it lacks."""

import pytest

from verl.rollout import vllm_build


@pytest.mark.parametrize(
    ("vllm", "capability", "chosen", "expected"),
    [("0.33.0", (8, 0), None, True), ("0.33.0", (8, 9), "1", True), ("0.33.0", (9, 0), None, True),
     ("0.33.0", (9, 0), "0", False), ("0.33.0", (7, 5), None, False),
     ("0.33.0", (7, 0), "1", False), ("0.26.0", (8, 6), None, True), ("", (8, 6), None, True),
     ("0.19.1", (8, 0), None, True), ("0.19.1", (8, 6), None, False),
     ("0.19.1", (8, 9), None, True), ("0.19.1", (9, 0), None, True),
     ("0.19.1", (10, 0), None, True), ("0.19.1", (7, 5), None, False)],
)  # fmt: skip
def test_batch_invariant_kernels_need_a_card_that_supports_them(
    vllm: str,
    capability: tuple[int, int],
    chosen: str | None,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM itself accepts the mode on any card; the user may disable it. 0.19 covers fewer."""
    monkeypatch.setattr(vllm_build, "version_of", lambda package: vllm)
    monkeypatch.setattr(vllm_build.torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    if chosen is not None:
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", chosen)
    assert vllm_build.is_batch_invariant("cuda") is expected
    assert vllm_build.is_batch_invariant("cpu") is False
