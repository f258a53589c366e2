"""Engines that start with a model's own weights check that these are numbers."""

import asyncio
from types import SimpleNamespace

import pytest
import torch

from verl.errors import ModelError
from verl.rollout.weight_check import check_weights
from verl.rollout.weight_loading import WeightLoading


def test_weights_that_are_no_numbers_are_named_once() -> None:
    """Each worker names those of the model that it has loaded; several may have the same one."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    worker = WeightLoading()
    worker.model_runner = SimpleNamespace(get_model=lambda: model)

    async def call(method: str) -> list[list[str]]:
        return [getattr(worker, method)() for _ in range(2)]

    asyncio.run(check_weights(call, "m"))
    with torch.no_grad():
        model[1].weight[0, 1] = torch.inf
    with pytest.raises(ModelError, match=r"weights of m: got NaN or infinite values in 1\.weight"):
        asyncio.run(check_weights(call, "m"))
