"""The published sizes of models, for tests of the estimate: facts, no weights."""

from __future__ import annotations

import json
from pathlib import Path

from verl.preflight.memory.shape import ModelShape

FACTS = json.loads((Path(__file__).parent / "models.json").read_text())


def shape_of(name: str) -> ModelShape:
    """The model of that name, such as Qwen2.5-7B or Qwen/Qwen2.5-7B-Instruct."""
    facts = FACTS[name.removeprefix("Qwen/").removesuffix("-Instruct")]
    shape = ModelShape.of({"model_type": "qwen2", **facts})
    assert shape is not None
    return shape
