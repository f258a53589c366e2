"""What a rank does in the tests of loading; importable by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.verl.training.ranks import tiny_config
from verl.config import AdapterConfig
from verl.errors import ModelError
from verl.training.fsdp import FsdpModel, FsdpOptions
from verl.training.loading import copy_without_values, open_causal_lm
from verl.training.lora import AdaptedModel, Role, build_adapted_model
from verl.training.models import LogProbModel, ValueModel, blocks, load_causal_lm
from verl.training.worker import TrainerWorker

CPU, OPTIONS = torch.device("cpu"), FsdpOptions(torch.bfloat16)
ADAPTERS = {Role.ACTOR: AdapterConfig(lora_rank=2)}


def whole(engine: FsdpModel) -> dict[str, Tensor]:
    """Parameters, gathered, and buffers of an engine."""
    return dict(engine.full_parameters()) | dict(engine.module.named_buffers())


def differences(engine: FsdpModel, expected: nn.Module) -> list[str]:
    """Names of what is not, to the bit and in its dtype, as in `expected`."""
    found = whole(engine)
    wanted = {n: p.detach() for n, p in expected.named_parameters()}
    wanted |= dict(expected.named_buffers())
    assert found.keys() == wanted.keys()
    return [n for n, x in found.items()
            if x.dtype is not wanted[n].dtype or not torch.equal(x, wanted[n])]  # fmt: skip


def refusals(rank: int, size: int, port: int, paths: list[str]) -> list[str]:
    """What each model that this rank cannot hold in float32 is refused with."""
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    found = []
    for path in paths:
        try:
            with open_causal_lm(path, torch.float32, size) as lm:
                FsdpModel(LogProbModel(lm), blocks(lm, lm), CPU, OPTIONS)
        except ModelError as error:
            found.append(str(error))
    dist.destroy_process_group()
    return found


def load(rank: int, size: int, port: int, folders: dict[str, str], large: str) -> dict[str, Any]:
    """A run's worker from the files of this rank below `large`, and engines of all `folders`.

    Returns the bytes that the worker's actor and reference add to this process at most, and the
    names of what is not as transformers loads it, by model and kind of engine.
    """
    config = tiny_config(f"{large}/{rank}", size, adv_estimator="grpo")
    with open_causal_lm(f"{large}/{rank}", torch.float32, size):
        pass  # imports
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    worker = TrainerWorker(config, rank, size, "127.0.0.1", port, 10)
    peak = status("VmHWM") - before
    wanted = LogProbModel(load_causal_lm(f"{large}/whole"))
    found = {"own rows": differences(worker.actor.model, wanted)}
    for name, path in folders.items():
        for kind, names in engines(path, size):
            found[f"{name}: {kind}"] = names
    worker.shutdown()
    return {"peak": peak, "differences": found}


def engines(path: str, size: int) -> Iterator[tuple[str, list[str]]]:
    """Each kind of engine, and what of it is not as transformers loads it."""
    expected = LogProbModel(load_causal_lm(path))
    with open_causal_lm(path, torch.float32, size) as lm:
        empty = copy_without_values(lm)
        policy = FsdpModel(LogProbModel(lm), blocks(lm, lm), CPU, OPTIONS)
    yield "policy", differences(policy, expected)
    is_tied = lm.get_output_embeddings().weight is lm.get_input_embeddings().weight
    assert is_tied is lm.config.tie_word_embeddings
    assert lm.config.dtype is torch.float32
    twin = FsdpModel(LogProbModel(empty), blocks(empty, empty), CPU, OPTIONS, copy_from=policy)
    yield "reference", differences(twin, expected)
    with open_causal_lm(path, torch.float32, size, needs_head=False) as lm:
        module = ValueModel(lm)
        critic = FsdpModel(module, blocks(module, lm), CPU, OPTIONS, [module.value_head])
    yield "critic", differences(critic, ValueModel(load_causal_lm(path)))
    for dtype in (torch.bfloat16, torch.float32):
        torch.manual_seed(3)
        with open_causal_lm(path, dtype, size) as lm:
            adapted = build_adapted_model(lm, ADAPTERS, CPU, OPTIONS)
        torch.manual_seed(3)
        expected = AdaptedModel(load_causal_lm(path, dtype), ADAPTERS)
        yield f"adapter, {dtype}", differences(adapted, expected)


def status(field: str) -> int:
    """A field of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
