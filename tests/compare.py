"""Compares two runs step by step, and their trained weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

MEASURED = (
    "timing_s/", "timing_per_token_ms/", "perf/", "memory/", "fault/", "rollout/wait_s/",
    "rollout/prefix_hit_share",
)  # fmt: skip
"""Prefixes of metrics that depend on time, machine or faults, not only on the seed."""
COMPUTED = ("perf/total_num_tokens",)
"""Metrics with such a prefix that nevertheless depend only on the seed."""

Row = Mapping[str, float | None]


@dataclass(frozen=True)
class Difference:
    """A metric that differs from the undisturbed run."""

    step: int
    name: str
    expected: float | None
    got: float | None


def read_rows(path: Path) -> list[dict[str, float | None]]:
    """Read the rows of a `metrics.jsonl`, without a line that a kill left incomplete."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def is_computed(name: str) -> bool:
    """Whether a metric depends only on the seed."""
    return name in COMPUTED or not name.startswith(MEASURED)


def differences(expected: Sequence[Row], got: Sequence[Row]) -> Iterator[Difference]:
    """Yield where `got` differs, or lacks a step or a metric.

    A step that was repeated after a kill is in `got` more than once; all of them are compared.
    """
    steps = {_step(row): row for row in expected}
    seen = {_step(row) for row in got}
    for step in steps.keys() - seen:
        yield Difference(step, "step", float(step), None)
    for row in got:
        step = _step(row)
        reference = steps.get(step, {})
        for name in sorted(filter(is_computed, reference.keys() | row.keys())):
            difference = Difference(step, name, reference.get(name), row.get(name))
            if difference.expected != difference.got:
                yield difference


def _step(row: Row) -> int:
    return int(row["step"] or 0)


def same_weights(one: Path, other: Path) -> bool:
    """Whether two Hugging Face folders have equal tensors, bit for bit."""
    first, second = _tensors(one), _tensors(other)
    return first.keys() == second.keys() and all(
        torch.equal(x, second[n]) for n, x in first.items()
    )


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    assert files, f"no weights in {folder}"
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
