"""Tier T1: real model shapes on simulated GPUs: peaks, FLOPs and waits are as expected."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.nightly.pretend_cuda.stopping import stop
from tests.nightly.pretend_cuda.trial import LONGEST, SHAPES, Case
from tests.nightly.pretend_cuda.trials import Trials
from tests.verl.ext.memory.test_presets import machine
from verl.ext.memory.estimate import Setting, estimate
from verl.ext.memory.needs import ASLEEP, Memory, Phase
from verl.ext.model_shape import ModelShape
from verl.training.models import LOGITS_PER_CHUNK

pytestmark = [pytest.mark.pretend_cuda, pytest.mark.slow, pytest.mark.timeout(1800)]
CASES = [
    {"algorithm": algorithm, "shape": shape, "world": world, "budget": budget}
    for algorithm in ("grpo", "ppo")
    for shape, world, budget in (
        ("1.5B", 1, 16384), ("3B", 8, 16384), ("7B", 8, 16384), ("32B", 16, 8192),
    )
]  # fmt: skip
SEQUENCE_PARALLEL: list[dict[str, Any]] = [
    {"algorithm": "ppo", "shape": "3B", "world": 8, "budget": 32768, "longest": 32768,
     "sp_size": size}
    for size in (1, 2, 4, 8)
]  # fmt: skip
SELECTIVE = {**CASES[1], "recompute": "selective"}  # of the 3B model
LORA: list[dict[str, Any]] = [
    {"algorithm": "lora", "shape": shape, "world": world, "budget": budget, "sp_size": size}
    for shape, world, budget, size in (
        ("1.5B", 1, 16384, 1), ("0.5B", 8, 3072, 1), ("7B", 8, 4608, 1), ("8B", 8, 16384, 8),
    )
]  # fmt: skip
SMALL = {"algorithm": "ppo", "shape": "8B", "world": 8, "budget": 3072}
"""Little more at once than the embedding and the head, which are gathered first."""
ALL_CASES = [*CASES, *SEQUENCE_PARALLEL, SELECTIVE, *LORA, SMALL]
PHASES = {
    "log_probs": (Phase.LOG_PROBS,),
    "ref_log_probs": (Phase.REF_LOG_PROBS,),
    "values": (Phase.VALUES,),
    "update_critic": (Phase.UPDATE_CRITIC, Phase.STEP_CRITIC),
    "update_actor": (Phase.UPDATE_ACTOR, Phase.STEP_ACTOR),
}
NOT_SIMULATED = ("rank's context", "engine, asleep")
"""Needs that no operation of the trainer causes."""


def name(case: dict[str, Any]) -> str:
    suffix = f"-sp{case['sp_size']}" if case.get("sp_size", 1) > 1 or "longest" in case else ""
    suffix += f"-{case['budget']}" * (case in (*LORA, SMALL))
    suffix += "-recompute" * ("recompute" in case)
    return f"{case['algorithm']}-{case['shape']}x{case['world']}{suffix}"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Outcomes by the names of the cases."""
    folder = tmp_path_factory.mktemp("trials")
    trials = Trials(folder, ALL_CASES)
    yield dict(zip(map(name, ALL_CASES), trials.outcomes(), strict=True))
    stop(folder)


def expected_peak(case: Case, phases: tuple[Phase, ...]) -> int:
    """Return the peak of device memory that `verl.ext.memory` estimates for `phases`."""
    assert ASLEEP.issuperset(phases)
    shape = ModelShape.of(SHAPES[case.shape].facts())
    setting = Setting(shape, shape, True, machine(8, 80, 1000), case.dtype)
    found = estimate(case.config(), setting)
    return max(
        sum(n.bytes for n in found.needs_in(Memory.DEVICE, phase) if n.name not in NOT_SIMULATED)
        for phase in phases
    )


@pytest.mark.parametrize("case", ALL_CASES, ids=name)
def test_peaks_are_those_of_the_estimate(case: dict[str, Any], outcomes: dict[str, Any]) -> None:
    """The peak of each pass is within 15 % of the memory estimate."""
    found = outcomes[name(case)]
    assert not found["error"]
    ratios = {
        phase: cost["peak"] / expected_peak(Case(**case), PHASES[phase])
        for phase, cost in found["phases"].items()
    }
    assert {phase: ratio for phase, ratio in ratios.items() if not 0.85 < ratio < 1.15} == {}


@pytest.mark.parametrize("case", CASES, ids=name)
def test_an_update_has_the_expected_waits_and_collectives(
    case: dict[str, Any], outcomes: dict[str, Any]
) -> None:
    """These cost time on a GPU; who adds a wait or a collective must change this test."""
    made = Case(**case)
    minis, groups = made.micro_batches, SHAPES[made.shape].layers + 1  # blocks, and the rest
    found = outcomes[name(case)]["phases"]["update_actor"]
    costs, tokens = found["costs"], minis * (made.budget // LONGEST) * LONGEST
    if made.world > 1:
        # Forward gathers each FSDP group, backward all but the last, which is still gathered.
        assert costs["collectives"]["allgather_base"] == minis * (2 * groups - 1)
        assert costs["collectives"]["reduce_scatter_base"] == minis * groups
        assert costs["collectives"]["all_reduce"] == 1, "the gradient's norm"
    assert costs["collectives"]["allreduce"] == 3, "micro-batches, sums, largest mismatch"
    waits = {
        "copy to device in training/fsdp.py:all_reduced": 1,
        "copy to host in training/fsdp.py:all_reduced": 3,
        "item in training/fsdp.py:step": 1,
    }  # none per micro-batch: the next one is copied while the device computes
    assert costs["syncs"] == waits
    assert costs["bytes_to_device"] < 48 * tokens, "ids, and a few columns of the loss"
    assert found["calls"].get("empty_cache", 0) == 0


@pytest.mark.parametrize("case", CASES, ids=name)
def test_flops_of_an_update(case: dict[str, Any], outcomes: dict[str, Any]) -> None:
    """An update takes 8 FLOPs per weight and token: 2 forward, 4 backward, 2 for recomputation.

    Each block's last product is not recomputed, since its result is not needed again; the head is
    computed at target tokens only.
    """
    made, shape = Case(**case), SHAPES[case["shape"]]
    minis = made.micro_batches
    sequences = minis * (made.budget // LONGEST)
    targets, tokens = 400 * sequences, LONGEST * sequences
    facts = ModelShape.of(shape.facts())
    trunk = tokens * (8 * facts.linear_weights - 2 * facts.last_linear_weights)
    recomputed = targets - minis * (LOGITS_PER_CHUNK // shape.vocab)
    assert recomputed > 0, "all chunks of the head but the last are recomputed"
    expected = trunk + (6 * targets + 2 * recomputed) * shape.vocab * shape.hidden
    found = outcomes[name(case)]["phases"]["update_actor"]["flops"]
    assert found["products"] == pytest.approx(expected, rel=0.01)
    # Two products forward, two recomputed and five backward, each of half a square.
    squares = shape.layers * facts.query_size * tokens * LONGEST
    assert found["attention"] == pytest.approx((2 + 2 + 5) * squares, rel=0.01)
