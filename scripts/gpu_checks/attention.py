"""Compares the installed packed attention kernels with attention per sequence in float32."""

import functools
import importlib
import itertools

import torch
from torch import Tensor

from scripts.gpu_checks.report import Report
from verl.ext import flash_attention
from verl.training import attention
from verl.training.attention import SequenceBounds, VarlenKernel

LENGTHS = [1, 17, 300, 128, 513]
SHARED = [(0, 130), (130, 131), (130, 400), (130, 643), (0, 17)]
"""A prompt, three responses that share it, and a separate sequence."""
BOUNDS = {torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Bounds on the largest error relative to the largest value: a few roundings of the dtype."""
KERNELS = {
    "torch_varlen": ("torch.nn.attention.varlen", "varlen_attn", "attend_with_torch_varlen"),
    "flash_attn": ("flash_attn", "flash_attn_varlen_func", "attend_with_flash"),
}


def check(report: Report) -> None:
    """Check each kernel, forward and backward; before Ampere and on CPU, the 16-bit reference."""
    has_kernels = report.on_card and torch.cuda.get_device_capability() >= (8, 0)
    checked = kernels() if has_kernels else {"one_by_one": attention.attend_per_run}
    report.record("kernels", list(checked))
    if report.on_card:
        chosen = flash_attention.cuda_kernel()
        report.record("chosen", getattr(chosen, "func", chosen).__name__)
    if not checked:
        report.fail("no packed kernel: this card would attend to one sequence at a time")
    for (name, kernel), dtype in itertools.product(checked.items(), BOUNDS):
        with report.part(f"{name} {dtype}"):
            compare(report, name, kernel, dtype)


def kernels() -> dict[str, VarlenKernel]:
    """Return the installed packed kernels by name."""
    installed: dict[str, VarlenKernel] = {}
    for name, (module, function_name, wrapper) in KERNELS.items():
        try:
            function = getattr(importlib.import_module(module), function_name)
        except (ImportError, AttributeError):
            continue
        attend = getattr(flash_attention, wrapper)
        installed[name] = functools.partial(attend, **{function_name: function})
    return installed


def compare(report: Report, name: str, kernel: VarlenKernel, dtype: torch.dtype) -> None:
    """Compare a kernel with the reference, in all combinations of layout, heads and window.

    The layouts are separate sequences and responses that share a prompt; key heads are grouped or
    as many as query heads; the sliding window is on or off; heads have size 64 or 128.
    """
    device, worst = torch.device(report.device), {"forward": 0.0, "backward": 0.0}
    layouts = [SequenceBounds.of(spans, device) for spans in ([(0, n) for n in LENGTHS], SHARED)]
    cases = itertools.product(layouts, (2, 8), (0, 64), (64, 128))
    for bounds, kv_heads, window, size in cases:
        generator = torch.Generator().manual_seed(kv_heads + window + size)
        tokens, keys = sum(bounds.lengths), sum(bounds.num_keys)
        shapes = [(tokens, 8, size), (keys, kv_heads, size), (keys, kv_heads, size),
                  (tokens, 8, size)]  # fmt: skip
        tensors = [torch.randn(s, generator=generator).to(device, dtype) for s in shapes]
        pairs = zip(
            run(kernel, tensors, bounds, window),
            run(attention.attend_per_run, [x.float() for x in tensors], bounds, window),
            strict=True,
        )
        errors = [relative(a, b) for a, b in pairs]
        worst["forward"] = max(worst["forward"], errors[0])
        worst["backward"] = max(worst["backward"], *errors[1:])
    for direction, error in worst.items():
        label = f"{name}_{str(dtype).removeprefix('torch.')}_{direction}"
        report.expect(label, error, below=BOUNDS[dtype])


def run(
    kernel: VarlenKernel, tensors: list[Tensor], bounds: SequenceBounds, window: int
) -> list[Tensor]:
    """Return the output and the gradients of `tensors`: query, key, value, output's gradient."""
    *inputs, gradient = tensors
    leaves = [x.detach().requires_grad_() for x in inputs]
    query, key, value = leaves
    output = kernel(query, key, value, bounds, inputs[0].shape[-1] ** -0.5, window)
    return [output, *torch.autograd.grad(output, leaves, gradient)]


def relative(got: Tensor, expected: Tensor) -> float:
    """Return the largest error relative to the largest expected value."""
    return float((got.float() - expected).abs().max() / expected.abs().max())
