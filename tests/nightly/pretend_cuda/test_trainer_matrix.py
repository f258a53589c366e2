"""Tier T0: each way of training on a simulated GPU without values, with the unmodified worker.

As on a GPU, operations on tensors of two devices are errors, and so are collectives on a device
that the process group has no backend for.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.nightly.pretend_cuda.matrix import (
    APART,
    CASES,
    OFFLOADS,
    SELECTIVE,
    SEQUENCE_PARALLEL,
    STEPS,
    WHOLE,
    name,
)
from tests.nightly.pretend_cuda.receiving import BUFFER_BYTES
from tests.nightly.pretend_cuda.trials import Outcomes

pytestmark = pytest.mark.pretend_cuda


@pytest.fixture(scope="module")
def outcomes(matrix: Outcomes) -> dict[str, Any]:
    """Outcomes by the names of the cases."""
    return dict(zip(map(name, CASES), matrix, strict=True))


@pytest.mark.parametrize("case", [*STEPS, *APART, WHOLE, *SEQUENCE_PARALLEL, *SELECTIVE], ids=name)
def test_a_step_runs_and_frees_its_device_memory(
    case: dict[str, Any], outcomes: dict[str, Any]
) -> None:
    """Every pass and update runs on the right devices and frees the memory it allocated."""
    found = outcomes[name(case)]
    assert not found["error"]
    assert {"update_actor", "update_critic"} & set(found["phases"])
    left = {phase: cost["left"] for phase, cost in found["phases"].items() if cost["left"]}
    assert left == {}


def test_offloaded_state_is_not_on_the_device(outcomes: dict[str, Any]) -> None:
    """Between steps, each kind of offloading frees the device memory it should."""
    held = {offload: outcomes[f"ppo-{offload}-2-bfloat16"]["held"] for offload in OFFLOADS}
    assert held["param"] < 0.05 * held["none"]
    assert held["none"] > held["reference"] > held["optimizer"]


@pytest.mark.parametrize("offload", OFFLOADS)
def test_state_is_read_after_its_copy_to_the_host(offload: str, outcomes: dict[str, Any]) -> None:
    """Moments are copied asynchronously; reading them synchronises once per actor and critic."""
    found = outcomes[f"ppo-{offload}-2-bfloat16"]["phases"]["tensors"]
    assert found["calls"] == {"synchronize": 2}


def test_a_critic_with_its_own_gpu_frees_the_actors(outcomes: dict[str, Any]) -> None:
    """Ranks of GRPO and of a critic hold in total what a rank of PPO holds."""
    together = outcomes["ppo-none-2-bfloat16"]["held"]
    apart = [outcomes[f"{kind}-none-2-bfloat16"]["held"] for kind in ("grpo", "critic")]
    assert sum(apart) == pytest.approx(together, rel=0.01)
    assert outcomes["critic-param-2-bfloat16"]["held"] < 0.05 * apart[1]


def test_more_ranks_hold_less(outcomes: dict[str, Any]) -> None:
    """Each of eight ranks holds an eighth of the weights and their moments."""
    one, eight = (outcomes[f"grpo-none-{world}-bfloat16"]["held"] for world in (1, 8))
    assert eight == pytest.approx(one / 8, rel=0.05)


def test_line_27_a_process_group_without_gloo_is_an_error(outcomes: dict[str, Any]) -> None:
    """The reason for this tier: the norm of offloaded gradients cannot be reduced by NCCL."""
    found = outcomes["grpo-param-2-bfloat16-only_nccl"]
    assert "No backend type associated with device type cpu" in found["error"]


@pytest.mark.parametrize(("phase", "groups"), [("update_actor", 3), ("update_critic", 4)])
def test_without_resharding_collectives_run_once_per_update(
    phase: str, groups: int, outcomes: dict[str, Any]
) -> None:
    """Not in each of two micro-batches; the peak of device memory is higher then."""
    each, once = (outcomes[key]["phases"][phase] for key in ("ppo-none-8-bfloat16", name(WHOLE)))
    counts = [found["costs"]["collectives"] for found in (each, once)]
    assert [count["reduce_scatter_base"] for count in counts] == [2 * groups, groups]
    assert [count["allgather_base"] for count in counts] == [2 * (2 * groups - 1), groups]
    assert once["peak"] > each["peak"]


def test_selective_recomputation_repeats_no_product(outcomes: dict[str, Any]) -> None:
    """It needs more memory than full recomputation; collectives are the same."""
    for algorithm, phase in (("ppo", "update_critic"), ("lora", "update_actor")):
        every, some = (
            outcomes[f"{algorithm}-none-8-bfloat16{end}"]["phases"][phase]
            for end in ("", "-recompute")
        )
        assert all(some["flops"][kind] < every["flops"][kind] for kind in ("products", "attention"))
        assert some["costs"]["collectives"] == every["costs"]["collectives"]
        assert some["peak"] > every["peak"]


def test_sequence_parallel_ranks_exchange_twice_a_pass_of_a_block(outcomes: dict[str, Any]) -> None:
    """Tokens are exchanged for heads and back, in forward, recomputation and backward.

    The results of the ranks are collected once per forward.
    """
    alone, grouped = (
        {phase: cost["costs"]["collectives"] for phase, cost in outcomes[key]["phases"].items()}
        for key in ("ppo-none-8-bfloat16", "ppo-none-8-bfloat16-sp_size")
    )
    minis, blocks = 2, 2
    for phase, passes in (("log_probs", 1), ("values", 1), ("update_critic", 3)):
        more = {name: n - alone[phase].get(name, 0) for name, n in grouped[phase].items()}
        micro = minis if phase.startswith("update") else 1
        assert {name: n for name, n in more.items() if n} == {
            "alltoall_base": 2 * passes * blocks * micro, "allreduce": micro
        }  # fmt: skip


@pytest.mark.parametrize("case", [case for case in STEPS if case["by_ipc"]], ids=name)
def test_weights_reach_an_engine_on_the_same_gpu(
    case: dict[str, Any], outcomes: dict[str, Any]
) -> None:
    """By CUDA IPC and whole: the trial compares names, dtypes and shapes at both ends.

    Rank and worker wait for the device once per buffer; no byte passes through the host, and the
    rank needs little more than two buffers.
    """
    found = outcomes[name(case)]
    assert not found["error"]
    cost = found["phases"]["send_weights"]
    assert cost["calls"]["synchronize"] % 2 == 0 and cost["calls"]["synchronize"] > 4
    assert cost["costs"]["bytes_to_host"] == 0 and cost["left"] == 0
    assert cost["peak"] < 5 * BUFFER_BYTES


@pytest.mark.parametrize("phase", ["log_probs", "values", "update_critic", "update_actor"])
def test_the_host_does_not_wait_for_micro_batches(phase: str, outcomes: dict[str, Any]) -> None:
    """It waits for their number before the first, and for their results after the last."""
    waits = {
        "copy to device in training/fsdp.py:all_reduced": 1,
        "copy to host in training/fsdp.py:all_reduced": 1,
    }
    if phase.startswith("update"):
        waits["copy to host in training/fsdp.py:all_reduced"] += 1 + (phase == "update_actor")
        waits["item in training/fsdp.py:step"] = 1
    else:
        waits["copy to host in training/actor.py:compute_at_targets"] = 1
    assert outcomes["ppo-none-8-bfloat16"]["phases"][phase]["costs"]["syncs"] == waits
