"""Writing weights as files."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests.full_disk import files_up_to
from verl.errors import ResourceError
from verl.files import is_file_error
from verl.training import weights
from verl.training.weights import FileLayout, write_together, write_weights


def test_only_the_writing_is_timed(tmp_path: Path) -> None:
    """The time to gather tensors does not count."""

    def slowly() -> Iterator[tuple[str, Tensor]]:
        for name in "ab":
            time.sleep(0.5)
            yield name, torch.zeros(3)

    assert 0 < write_weights(tmp_path, slowly(), LlamaConfig(), "float32") < 0.5


def test_several_files_are_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By transformers, which prefers a `model.safetensors`; also in a reused folder."""
    config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=2,
                         num_attention_heads=2)  # fmt: skip
    for size in (64, 1 << 20, 64):
        monkeypatch.setattr(weights, "SHARD_BYTES", size)
        lm = LlamaForCausalLM(config)
        write_weights(tmp_path, lm.state_dict().items(), config, "float32")
        assert (tmp_path / "model.safetensors").exists() is (size > 64)
        actual = LlamaForCausalLM.from_pretrained(tmp_path).state_dict()
        assert all(torch.equal(actual[name], x) for name, x in lm.state_dict().items())


def test_several_writers_write_one_model(tmp_path: Path) -> None:
    """Each writes an equal part, and transformers reads the whole."""
    config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=2,
                         num_attention_heads=2)  # fmt: skip
    lm = LlamaForCausalLM(config)
    for writer in (2, 0, 1):
        named = lm.state_dict().items()
        write_weights(tmp_path, named, config, "float32", writer, num_writers=3)
    actual = LlamaForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(actual[name], x) for name, x in lm.state_dict().items())
    sizes = [path.stat().st_size for path in tmp_path.glob("*.safetensors")]
    assert len(sizes) == 3 and max(sizes) < 2 * min(sizes)


def test_the_memory_of_all_writers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file of four writers has at most a quarter of SHARD_BYTES."""
    monkeypatch.setattr(weights, "SHARD_BYTES", 400)
    layout, sizes = FileLayout(4), dict[str, int]()
    for i in range(100):
        _, file = layout.place(str(i), 1 + 7 * i % 60)
        sizes[file] = sizes.get(file, 0) + 1 + 7 * i % 60
    assert max(sizes.values()) <= 100 and len(layout.index) == 100


def test_a_full_disk_is_an_os_error(tmp_path: Path) -> None:
    """safetensors raises its own error, which commands do not handle."""
    with files_up_to(1000), pytest.raises(OSError, match=r"model\.safetensors") as caught:
        weights.write_file(tmp_path / "model.safetensors", {"a": torch.zeros(1000)})
    assert is_file_error(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_cannot_write_does_not_block_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors are gathered together: it takes part to the end, and raises then."""
    events = list[str]()

    def gather() -> Iterator[tuple[str, Tensor]]:
        for name in "abc":
            yield name, torch.zeros(1)
            events.append(name)

    def fail() -> float:
        next(named)
        raise OSError(28, "No space left on device", str(tmp_path))

    named = gather()
    monkeypatch.setattr(weights.dist, "barrier", lambda: events.append("barrier"))
    with pytest.raises(ResourceError, match="No space left"):
        write_together(tmp_path, fail, named)
    assert events == ["a", "b", "c", "barrier"]
