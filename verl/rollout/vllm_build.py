"""What the installed build of vLLM can do: on which device, with which arguments, how exactly."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from verl.config import Config
from verl.config.engine_kwargs import KEY, given
from verl.errors import ConfigError, ModelError, explain
from verl.nvidia import is_older, version_of, vllm_device
from verl.training.devices import is_surely_cpu

BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
COVERS_AMPERE_SINCE, COVERED_BEFORE = (0, 26), ((8, 0), (8, 9))
"""vLLM whose batch-invariant products are for all cards of capability 8, and those of before."""
CPU_LACKS = {
    "quantization": "vLLM's CPU build has no kernel for 8-bit weights",
    "speculative_config": "vLLM's CPU build (0.32) verifies drafts at a wrong temperature",
}
"""Arguments of vLLM with which its CPU build fails, or samples from another distribution."""


def check_device(device: str) -> None:
    """Raise ModelError if vLLM is built for another device.

    A GPU build would allocate 92 % of card 0 in a run on the CPU.
    """
    installed = vllm_device()
    if installed and installed != device:
        expected, got = f"its {device} build", f"vLLM's {installed} build"
        fix = f"set device to {installed}, or install the other: docs/start/installation.md"
        raise ModelError(explain("rollout engine", got, expected, fix))


def problems(config: Config) -> Iterator[ConfigError]:
    """Yield the arguments of `engine_kwargs` with which vLLM fails on the run's device."""
    if config.samples_rollouts and is_surely_cpu(config.trainer.device):
        arguments = given(config.actor_rollout_ref.rollout.engine_kwargs)
        for name in CPU_LACKS.keys() & arguments.keys():
            expected = f"nothing: {CPU_LACKS[name]}"
            yield ConfigError(explain(f"{KEY}.{name}", arguments[name], expected, "leave it out"))


def is_batch_invariant(device: str) -> bool:
    """Whether vLLM's batch-invariant mode works here and was not disabled in the environment.

    vLLM accepts the mode on any card. It has its own matrix products for compute capability 8 (0.19
    not for all of it), and excludes the variable algorithms of cuBLAS for 9 and newer; for older
    cards it guarantees nothing (`enable_batch_invariant_mode`, vLLM 0.19, 0.26 and 0.33).
    """
    if device != "cuda" or os.environ.get(BATCH_INVARIANT) == "0":
        return False
    capability = torch.cuda.get_device_capability()
    if is_older(version_of("vllm"), COVERS_AMPERE_SINCE) and capability < (9, 0):
        return capability in COVERED_BEFORE
    return capability >= (8, 0)
