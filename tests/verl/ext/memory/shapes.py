"""Published model sizes for tests of the estimate, without weights."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from transformers import Qwen2Config

from verl.ext.model_shape import ModelShape

FACTS = json.loads((Path(__file__).parent / "models.json").read_text())


@functools.cache
def shape_of(name: str) -> ModelShape:
    """Return the shape of a model by name, such as Qwen2.5-7B or Qwen/Qwen2.5-7B-Instruct."""
    facts = FACTS[name.removeprefix("Qwen/").removesuffix("-Instruct")]
    return ModelShape.of(Qwen2Config(**facts))
