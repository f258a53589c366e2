"""Each rank reads only its own rows; files that cannot be mapped are loaded in turns."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.hub import serving_hub
from tests.verl.training import loading_bodies
from tests.verl.training.ranks import VOCAB, run_ranks
from verl.errors import ModelError
from verl.machine import HostMemory
from verl.training import loading
from verl.training.loading import (
    Placeholder,
    load_causal_lm,
    loading_turn,
    open_causal_lm,
    weight_bytes,
)

GIB = 2**30
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip


def write(folder: Path, model: PreTrainedModel, dtype: torch.dtype, **options: Any) -> str:
    model.to(dtype).save_pretrained(folder, **options)
    return str(folder)


def qwen2(folder: Path, dtype: torch.dtype = torch.bfloat16, is_tied: bool = True) -> str:
    """Write a model in several files."""
    config = Qwen2Config(**SIZES, tie_word_embeddings=is_tied)
    return write(folder, Qwen2ForCausalLM(config), dtype, max_shard_size=20_000)


def mixed(folder: Path) -> str:
    """Write a model with float32 norms and bfloat16 matrices."""
    path = write(folder, Qwen2ForCausalLM(Qwen2Config(**SIZES)), torch.float32)
    tensors = load_file(folder / "model.safetensors")
    cut = {n: x.bfloat16() if x.dim() > 1 else x for n, x in tensors.items()}
    save_file(cut, folder / "model.safetensors", metadata={"format": "pt"})
    return path


def old_format(folder: Path) -> str:
    path = write(folder, Qwen2ForCausalLM(Qwen2Config(**SIZES)), torch.bfloat16)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return path


@pytest.fixture(scope="module")
def mapped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Write models whose files can be mapped; returns their folders by description."""
    at = tmp_path_factory.mktemp("mapped")
    qwen3 = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=False))
    llama = LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE))
    return {
        "Qwen2, tied, bfloat16, several files": qwen2(at / "qwen2"),
        "Qwen3, untied, float16": write(at / "qwen3", qwen3, torch.float16),
        "Llama, scaled, float32": write(at / "llama", llama, torch.float32),
    }


@pytest.fixture(scope="module")
def unmapped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Write models that must be loaded whole; returns their folders by reason."""
    at = tmp_path_factory.mktemp("unmapped")
    gemma = Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, tie_word_embeddings=True))
    experts = Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=16)
    return {
        "two dtypes": mixed(at / "mixed"),
        "old format": old_format(at / "old"),
        "buffers rounded": write(at / "gemma", gemma, torch.bfloat16),
        "converted": write(at / "moe", Qwen3MoeForCausalLM(experts), torch.bfloat16),
    }


@dataclass(frozen=True)
class Loaded:
    """Results of two ranks."""

    results: list[dict[str, Any]]
    num_values: int
    """Number of parameters of the large model."""


@pytest.fixture(scope="module")
def loaded(
    mapped: dict[str, str], unmapped: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Loaded:
    """Load on two ranks; each one's files of a large model have NaN in the other's rows."""
    at = tmp_path_factory.mktemp("large")
    sizes = SIZES | {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=True))
    whole = Path(write(at / "whole", model, torch.bfloat16))
    for rank in (0, 1):
        folder = Path(shutil.copytree(whole, at / str(rank)))
        tensors = load_file(folder / "model.safetensors")
        for tensor in tensors.values():
            others = [half for r, half in enumerate(tensor.chunk(2)) if r != rank]
            others[0].fill_(torch.nan)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    results = run_ranks(2, loading_bodies.load, mapped | unmapped, str(at))
    return Loaded(results, sum(p.numel() for p in model.parameters()))


def test_two_ranks_hold_what_transformers_loads(loaded: Loaded) -> None:
    """Weights, buffers and ties of policy, reference, critic and adapted models are bit-identical.

    For the large model, a rank's files have valid values only in its own rows: so it reads no
    other rows, and all ranks together read every byte once.
    """
    for result in loaded.results:
        assert len(result["differences"]) == 1 + 5 * 7
        assert not {kind: names for kind, names in result["differences"].items() if names}


def test_a_rank_never_holds_a_whole_model(loaded: Loaded) -> None:
    """The peak is its own shards and rows of the file; loading whole would add 4 bytes a value."""
    shards = 8 * loaded.num_values  # half of: float32 actor with its two moments, and reference
    rows = 1 * loaded.num_values  # half of two bytes a value; the kernel maps some more pages
    for result in loaded.results:
        assert result["peak"] < shards + 2 * rows


@pytest.mark.parametrize("kind", ["two dtypes", "old format", "buffers rounded", "converted"])
def test_what_cannot_be_mapped_is_loaded_whole(
    kind: str, unmapped: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """The log reports it."""
    caplog.set_level("INFO")
    with open_causal_lm(unmapped[kind], torch.float32, 2) as lm:
        assert not any(isinstance(p, Placeholder) for p in lm.parameters())
    assert "is loaded whole" in caplog.text


def test_a_mapped_model_holds_no_values(mapped: dict[str, str]) -> None:
    """Rows of 16-bit files are cast to float32 only when they are read."""
    for kind, path in mapped.items():
        with open_causal_lm(path, torch.float32, 2) as lm:
            is_float32 = "float32" in kind
            assert all(isinstance(p, Placeholder) is not is_float32 for p in lm.parameters())


def test_a_hub_model_is_mapped_at_its_first_use(tmp_path: Path) -> None:
    """Its configuration, which is read first, must not count as the whole model in the cache."""
    qwen2(tmp_path / "model")
    files = {f"org/tiny/{path.name}": path.read_bytes() for path in (tmp_path / "model").iterdir()}
    program = (
        "import torch\n"
        "from verl.training.loading import Placeholder, open_causal_lm\n"
        "with open_causal_lm('org/tiny', torch.float32, 1) as lm:\n"
        "    print(all(isinstance(p, Placeholder) for p in lm.parameters()))\n"
    )
    with serving_hub(files) as url:
        environment = os.environ | {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "cache")}
        environment.pop("HF_HUB_OFFLINE", None)
        command = [sys.executable, "-c", program]
        output = subprocess.run(command, env=environment, check=True, capture_output=True)
    assert output.stdout.split() == [b"True"]


def without(folder: Path, name: str) -> None:
    """Remove a tensor from a model's files."""
    index = folder / "model.safetensors.index.json"
    entries = json.loads(index.read_text())
    file = folder / entries["weight_map"].pop(name)
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    index.write_text(json.dumps(entries))


def test_a_missing_weight_is_an_error_that_names_it(tmp_path: Path) -> None:
    """transformers would only warn and use random numbers."""
    path, name = qwen2(tmp_path), "model.layers.1.mlp.up_proj.weight"
    without(tmp_path, name)
    with pytest.raises(ModelError, match=f"missing {name}"):
        load_causal_lm(path, needs_head=False)
    with (
        pytest.raises(ModelError, match=f"missing {name}"),
        open_causal_lm(path, torch.float32, 1),
    ):
        pass


def test_only_a_critic_may_lack_the_head(tmp_path: Path) -> None:
    """A critic uses the hidden states below the head."""
    path = qwen2(tmp_path, is_tied=False)
    without(tmp_path, "lm_head.weight")
    load_causal_lm(path, needs_head=False)
    with pytest.raises(ModelError, match=r"missing lm_head\.weight"):
        load_causal_lm(path)


@pytest.mark.parametrize(
    ("num_ranks", "files", "free", "expected"),
    [
        (8, 6, 200, False),
        (8, 6, 150, True),
        (8, 62, 1000, True),
        (1, 6, 30, False),
        (8, 0, 0, False),
    ],
)
def test_ranks_load_in_turns_if_memory_is_short(
    num_ranks: int, files: int, free: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight ranks that load 6 GiB of bfloat16 need 96 GiB in float32: 200 are enough, 150 not."""
    locks: list[object] = []
    monkeypatch.setattr(loading.fcntl, "flock", lambda *args: locks.append(args))
    monkeypatch.setattr(loading, "weight_bytes", lambda _: files * GIB)
    monkeypatch.setattr(loading.HostMemory, "now", lambda: HostMemory(free * GIB, free * GIB))
    with loading_turn("model", num_ranks):
        assert bool(locks) is expected


@pytest.mark.parametrize("share", [0.0, 1e9])
def test_one_rank_loads_whole_at_a_time(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With too little memory the second rank starts after the first has finished, else before."""
    monkeypatch.setattr(loading, "MEMORY_SHARE", share)
    monkeypatch.setattr(loading.tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    is_inside = threading.Event()

    def second() -> None:
        with loading_turn(str(tmp_path), 2):
            is_inside.set()

    thread = threading.Thread(target=second)
    with loading_turn(str(tmp_path), 2):
        thread.start()
        is_inside_at_once = is_inside.wait(0.5 if share == 0 else 30)
    thread.join(30)
    assert is_inside.is_set()
    assert is_inside_at_once is (share > 0)


def test_weights_are_counted_in_folders_only(tmp_path: Path) -> None:
    """Other files of a model do not count, and a model that was never downloaded has size 0."""
    (tmp_path / "model-1.safetensors").write_bytes(b"x" * 7)
    (tmp_path / "model-2.safetensors").write_bytes(b"x" * 5)
    (tmp_path / "tokenizer.json").write_bytes(b"x" * 100)
    assert weight_bytes(str(tmp_path)) == 12
    assert weight_bytes("nobody/nothing-of-the-kind") == 0
    assert weight_bytes("/no/such/folder") == 0


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    """By the rank that reads them, mapped or loaded whole, also if they overflow in the cast."""
    names = ("model.layers.1.mlp.up_proj.weight", "model.norm.weight")
    paths = []
    for bad in (torch.nan, -torch.inf, 1e39):
        for dtype in (torch.float64, torch.bfloat16):  # the first is loaded whole
            folder = tmp_path / f"{dtype}{bad}"
            paths.append(write(folder, Qwen2ForCausalLM(Qwen2Config(**SIZES)), dtype))
            tensors = load_file(folder / "model.safetensors")
            for name in names:
                tensors[name].view(-1)[-1] = bad
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (errors,) = run_ranks(1, loading_bodies.refusals, paths)
    assert len(errors) == 6
    for error in errors:
        assert error.startswith("weights: got NaN or infinite values in ")
        assert all(name in error for name in names) and "(2 in all)" in error
