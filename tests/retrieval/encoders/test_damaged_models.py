"""Damaged and unsupported model folders give an error of one line, whatever libraries raise."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from search_r1.retrieval.encoder import open_encoder
from search_r1.retrieval.errors import SetupError
from search_r1.retrieval.settings import EncoderConfig

WEIGHTS = "model.safetensors"


def text(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


def values(name: str, **changes: object) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        content = {**json.loads((folder / name).read_text()), **changes}
        (folder / name).write_text(json.dumps({k: v for k, v in content.items() if v is not ...}))

    return damage


def weights(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        original = load_file(folder / WEIGHTS)
        changed = {name: change(value).contiguous() for name, value in original.items()}
        save_file(changed, folder / WEIGHTS, {"format": "pt"})

    return damage


def truncate(name: str, size: int) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


DAMAGES = {
    "no-config": lambda folder: (folder / "config.json").unlink(),
    "config-empty": text("config.json", ""),
    "config-garbage": text("config.json", "}{"),
    "config-list": text("config.json", "[]"),
    "config-deep": text("config.json", "[" * 100_000),
    "config-unknown-type": values("config.json", model_type="nobody"),
    "config-no-type": values("config.json", model_type=...),
    "config-other-heads": values("config.json", num_attention_heads=5),
    "config-heads-0": values("config.json", num_attention_heads=0),
    "config-text-size": values("config.json", hidden_size="many"),
    "config-negative-size": values("config.json", hidden_size=-32),
    "config-more-layers": values("config.json", num_hidden_layers=4),
    "config-wider": values("config.json", intermediate_size=128),
    "no-weights": lambda folder: (folder / WEIGHTS).unlink(),
    "weights-empty": truncate(WEIGHTS, 0),
    "weights-header": truncate(WEIGHTS, 100),
    "weights-half": truncate(WEIGHTS, 20_000),
    "weights-garbage": text(WEIGHTS, "no tensors"),
    "weights-nan": weights(lambda value: value * float("nan")),
    "weights-infinite": weights(lambda value: value + float("inf")),
    "weights-transposed": weights(lambda value: value.T if value.ndim == 2 else value),
    "weights-half-as-wide": weights(lambda value: value[..., ::2]),
    "tokenizer-garbage": text("tokenizer.json", "}{"),
    "tokenizer-list": text("tokenizer.json", "[]"),
    "modules-garbage": text("modules.json", "}{"),
    "modules-empty": text("modules.json", "[]"),
    "modules-object": text("modules.json", "{}"),
    "modules-unknown": text("modules.json", '[{"idx": 0, "name": "0", "path": "", "type": "a.B"}]'),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_encoder_is_refused(
    make_model: Callable[..., str], damage: Callable[[Path], object]
) -> None:
    """A damaged model is never used; the error is one line."""
    folder = make_model("e5-tiny")
    damage(Path(folder))
    with pytest.raises(SetupError, match="expected") as caught:
        open_encoder(EncoderConfig(folder, encoder_device="cpu"))
    assert len(str(caught.value).splitlines()) == 1
