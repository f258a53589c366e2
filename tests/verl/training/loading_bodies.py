"""Functions that ranks run in the tests of loading; importable by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.verl.training.ranks import tiny_config
from verl.config import AdapterConfig
from verl.errors import ModelError
from verl.ext.lora.model import AdaptedModel, Role, build_adapted_model
from verl.training.fsdp import FsdpModel, FsdpOptions
from verl.training.loading import copy_without_values, load_causal_lm, open_causal_lm
from verl.training.models import LogProbModel, ValueModel, blocks
from verl.training.worker import TrainerWorker

CPU, OPTIONS = torch.device("cpu"), FsdpOptions(torch.bfloat16)
ADAPTERS = {Role.ACTOR: AdapterConfig(lora_rank=2)}


def differences(model: FsdpModel, expected: nn.Module) -> list[str]:
    """Return the names of parameters and buffers that differ from `expected` in bits or dtype."""
    actual = dict(model.full_parameters()) | dict(model.module.named_buffers())
    tensors = {n: p.detach() for n, p in expected.named_parameters()}
    tensors |= dict(expected.named_buffers())
    assert actual.keys() == tensors.keys()
    return [n for n, x in actual.items()
            if x.dtype is not tensors[n].dtype or not torch.equal(x, tensors[n])]  # fmt: skip


def refusals(rank: int, size: int, port: int, paths: list[str]) -> list[str]:
    """Return the error with which each model is refused by this rank."""
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    errors = []
    for path in paths:
        try:
            with open_causal_lm(path, torch.float32, size) as lm:
                FsdpModel(LogProbModel(lm), blocks(lm, lm), CPU, OPTIONS)
        except ModelError as error:
            errors.append(str(error))
    dist.destroy_process_group()
    return errors


def load(rank: int, size: int, port: int, folders: dict[str, str], large: str) -> dict[str, Any]:
    """Build a run's worker from this rank's files below `large`, and models of all `folders`.

    Returns the peak of the bytes that the worker's actor and reference add to this process, and the
    names of tensors that differ from transformers' own, by model and kind.
    """
    config = tiny_config(f"{large}/{rank}", size, adv_estimator="grpo")
    with open_causal_lm(f"{large}/{rank}", torch.float32, size):
        pass  # so that the imports do not count as memory of the models
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    worker = TrainerWorker(config, rank, size, "127.0.0.1", port, 10)
    peak = status("VmHWM") - before
    expected = LogProbModel(load_causal_lm(f"{large}/whole"))
    results = {"own rows": differences(worker.actor.model, expected)}
    for name, path in folders.items():
        for kind, names in models(path, size):
            results[f"{name}: {kind}"] = names
    worker.shutdown()
    return {"peak": peak, "differences": results}


def models(path: str, size: int) -> Iterator[tuple[str, list[str]]]:
    """Yield each kind of model, and its tensors that differ from transformers' own."""
    expected = LogProbModel(load_causal_lm(path))
    with open_causal_lm(path, torch.float32, size) as lm:
        reference_lm = copy_without_values(lm)
        policy = FsdpModel(LogProbModel(lm), blocks(lm, lm), CPU, OPTIONS)
    yield "policy", differences(policy, expected)
    is_tied = lm.get_output_embeddings().weight is lm.get_input_embeddings().weight
    assert is_tied is lm.config.tie_word_embeddings
    assert lm.config.dtype is torch.float32
    module = LogProbModel(reference_lm)
    reference = FsdpModel(module, blocks(module, lm), CPU, OPTIONS, copy_from=policy)
    yield "reference", differences(reference, expected)
    with open_causal_lm(path, torch.float32, size, needs_head=False) as lm:
        value_model = ValueModel(lm)
        heads = [value_model.value_head]
        critic = FsdpModel(value_model, blocks(value_model, lm), CPU, OPTIONS, heads)
    yield "critic", differences(critic, ValueModel(load_causal_lm(path)))
    for dtype in (torch.bfloat16, torch.float32):
        torch.manual_seed(3)
        with open_causal_lm(path, dtype, size) as lm:
            adapted = build_adapted_model(lm, ADAPTERS, CPU, OPTIONS)
        torch.manual_seed(3)
        expected = AdaptedModel(load_causal_lm(path, dtype), ADAPTERS)
        yield f"adapter, {dtype}", differences(adapted, expected)


def status(field: str) -> int:
    """Return a field of this process's /proc status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
