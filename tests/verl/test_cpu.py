"""Which processors have instructions for bfloat16."""

from pathlib import Path

import pytest
import torch

from verl.cpu import has_bfloat16


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx512f avx512_bf16 amx_tile\n", True),
        ("processor\t: 0\nflags\t\t: fpu amx_bf16\n", True),
        ("processor\t: 0\nflags\t\t: fpu avx512f avx512_bf160\n", False),
        ("processor\t: 0\nmodel name\t: avx512_bf16\nflags\t\t: fpu\n", False),
        ("processor\t: 0\nFeatures\t: fp asimd bf16\n", False),
        ("", False),
    ],
)
def test_flags_are_whole_words_of_their_line(tmp_path: Path, text: str, expected: bool) -> None:
    """ARM's line has another name; torch's kernels for it are not tuned for bfloat16."""
    (tmp_path / "cpuinfo").write_text(text)
    assert has_bfloat16(tmp_path / "cpuinfo") is expected


def test_without_the_file_there_is_none(tmp_path: Path) -> None:
    """macOS has no such file."""
    assert not has_bfloat16(tmp_path / "none")


@pytest.mark.skipif(not hasattr(torch.cpu, "get_capabilities"), reason="torch 2.11 and newer")
def test_torch_agrees() -> None:
    """torch 2.11 and newer ask the processor itself."""
    units = torch.cpu.get_capabilities()
    assert has_bfloat16() is bool(units.get("avx512_bf16") or units.get("amx_bf16"))
