"""Weights as files."""

import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig

from verl.training.weights import write_weights


def test_only_the_writing_is_timed(tmp_path: Path) -> None:
    """Tensors that are long in coming (gathered over ranks) do not count."""

    def slowly() -> Iterator[tuple[str, Tensor]]:
        for name in "ab":
            time.sleep(0.5)
            yield name, torch.zeros(3)

    assert 0 < write_weights(tmp_path, slowly(), LlamaConfig(), "float32") < 0.5
