"""Bad model folders are refused with a one-line error before loading; good ones pass."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.bad_models import BAD, NORM, SHARD, entry, gone, in_tokenizer, whole_model
from verl.errors import ModelError
from verl.model_files import (
    check_finite,
    check_model,
    is_finite,
    load_tokenizer,
    num_positions,
    tokenizer_identity,
    weights_fingerprint,
)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_single_non_finite_value_is_found(bad: float, dtype: torch.dtype) -> None:
    """At any position, in any dtype of weights."""
    for position in (0, 41, 99):
        values = torch.randn(100, dtype=dtype).clamp(-3, 3)
        assert is_finite(values)
        values[position] = bad
        assert not is_finite(values.view(10, 10))


@pytest.mark.parametrize(
    "values",
    [
        torch.zeros(0),
        torch.ones(3, dtype=torch.int8),
        torch.ones(3, dtype=torch.bool),
        torch.ones(3).to(torch.float8_e4m3fn),
        torch.tensor([torch.finfo(torch.float16).max, torch.finfo(torch.float16).min]).half(),
    ],
)
def test_finite_values_pass(values: Tensor) -> None:
    """Empty tensors, integers, packed values, and the largest values of a dtype."""
    assert is_finite(values)


def test_the_error_names_the_first_tensors_and_their_number() -> None:
    """Three names in order, in one line."""
    bad, good = torch.tensor([torch.nan]), torch.ones(2)
    named = [*((f"w{i}", bad) for i in range(5, 0, -1)), ("fine", good)]
    with pytest.raises(ModelError) as caught:
        check_finite(named, "weights of x")
    assert str(caught.value).startswith(
        "weights of x: got NaN or infinite values in w1, w2, w3 (5 in all)"
    )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LlamaConfig(max_position_embeddings=4096), 4096),
        (LlamaConfig(max_position_embeddings=4096,
                     rope_scaling={"rope_type": "linear", "factor": 4.0}), 16384),
        (LlamaConfig(max_position_embeddings=32768, rope_scaling={
            "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}), 131072),
        (LlamaConfig(max_position_embeddings=131072, rope_scaling={
            "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0, "high_freq_factor": 4.0}), 131072),
        (GPT2Config(n_positions=1024), 1024),
        (MambaConfig(), None),
    ],
)  # fmt: skip
def test_context_length_is_from_the_config(config: PretrainedConfig, expected: int | None) -> None:
    """RoPE scaling counts once, and a model without positions has no limit."""
    assert num_positions(config) == expected


ROWS = 257
SIZES: dict[str, Any] = {
    "vocab_size": ROWS + 3, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "eos_token_id": 256,
    "pad_token_id": 256, "bos_token_id": 256,
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A valid model folder."""
    return whole_model(tmp_path_factory.mktemp("whole") / "model")


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """A copy of the folder that a test may change."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail on network access."""

    def fail(*_: Any) -> None:
        raise AssertionError("a model's folder needs no network")

    monkeypatch.setattr(socket.socket, "connect", fail)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def refusal(path: Path | str, **options: Any) -> str:
    """Check a model that must be refused, and return the one-line error."""
    with pytest.raises(ModelError) as caught:
        check_model("some.option", str(path), **options)
    text = str(caught.value)
    assert text.startswith("some.option: got ") and "\n" not in text and "\x1b" not in text
    assert len(text) < 700
    return text


@pytest.mark.parametrize("case", BAD)
def test_a_bad_folder_is_refused_in_one_line(case: str, copy: Path) -> None:
    """Without network access or waiting, and with the problem in the message."""
    change, message = BAD[case]
    change(copy)
    assert message in refusal(copy)


@pytest.mark.parametrize(
    "path", ["/nowhere/at/all", "", ".", "~nobody/x", "~no such user/x", "a\0b", "x" * 260]
)
def test_a_path_that_is_not_a_model_folder_is_refused(path: str) -> None:
    """A missing path, an invalid name, or a folder with other content."""
    assert refusal(path)


def test_a_file_in_place_of_a_folder_is_refused(copy: Path) -> None:
    """For example the path of the config."""
    assert "a file" in refusal(copy / "config.json")


@pytest.mark.parametrize("name", ["", "config.json", "tokenizer.json", SHARD])
def test_unreadable_files_are_refused(name: str, whole: Path) -> None:
    """The folder itself, or a file in it."""
    with tempfile.TemporaryDirectory() as outside:  # other users may not enter pytest's own folders
        Path(outside).chmod(0o755)
        copy = Path(shutil.copytree(whole, Path(outside) / "model"))
        for file in copy.iterdir():
            file.chmod(0o644)
        (copy / name).chmod(0)
        is_root = os.geteuid() == 0
        try:
            if is_root:
                os.seteuid(65534)
            assert "ermission denied" in refusal(copy)
        finally:
            if is_root:
                os.seteuid(0)
            copy.chmod(0o755)


def qwen2(is_tied: bool) -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=is_tied))


def experts() -> PreTrainedModel:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=8))


def gemma() -> PreTrainedModel:
    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES))


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=ROWS, n_embd=16, n_layer=2, n_head=2,
                                      eos_token_id=256, bos_token_id=256))  # fmt: skip


def with_tensors(folder: Path, **tensors: Tensor) -> None:
    """Add tensors to the weights file of a model."""
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "a tied head": lambda: qwen2(True),
    "an untied head": lambda: qwen2(False),
    "norms with an offset": gemma,
    "mixture of experts": experts,
    "learned positions": gpt2,
    "half precision": lambda: qwen2(False).half(),
    "bfloat16": lambda: qwen2(True).bfloat16(),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_whole_model_passes(kind: str, copy: Path) -> None:
    """In one file, in several files, and in torch's older format."""
    lm = MODELS[kind]()
    gone("model*")(copy)
    for size in ("1GB", "5KB"):
        lm.save_pretrained(copy, max_shard_size=size)
        check_model("model", str(copy))
        gone("model*")(copy)
    torch.save(lm.state_dict(), copy / "pytorch_model.bin")
    check_model("model", str(copy))


def test_known_extras_pass(copy: Path) -> None:
    """A tied head that is also saved, and buffers that old files contain."""
    gone("model*")(copy)
    lm = qwen2(True)
    lm.save_pretrained(copy)
    head = lm.get_input_embeddings().weight.detach().clone()
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    with_tensors(copy, **{"lm_head.weight": head}, **old)
    check_model("model", str(copy))


def test_a_folder_without_template_or_defaults_passes(copy: Path) -> None:
    """A base model has neither."""
    gone("chat_template.jinja", "generation_config.json")(copy)
    check_model("model", str(copy))


def test_an_unused_special_token_beyond_the_embedding_passes(copy: Path) -> None:
    """Text-only Gemma 3 has one for images; an end-of-sequence token beyond it is refused."""

    def add(tokenizer: dict[str, Any]) -> None:
        first = tokenizer["added_tokens"][0]
        token = {**first, "id": ROWS, "content": "<image>", "special": True}
        tokenizer["added_tokens"].append(token)

    in_tokenizer(add)(copy)
    check_model("model", str(copy))
    entry("tokenizer_config.json", "eos_token", "<image>")(copy)
    assert f"ids up to {ROWS} over an embedding of {ROWS} rows" in refusal(copy)


def test_a_critic_needs_neither_head_nor_tokenizer(copy: Path, whole: Path) -> None:
    """Its trunk must be complete, and its embedding cover all tokens of the policy's tokenizer."""
    gone("model*", "tokenizer*", "chat_template*")(copy)
    qwen2(False).save_pretrained(copy)
    file = copy / "model.safetensors"
    tensors = load_file(file)
    del tensors["lm_head.weight"]
    save_file(tensors | {"score.weight": torch.ones(1, 16)}, file, metadata={"format": "pt"})
    critic: dict[str, Any] = {"needs_head": False, "tokenizer_of": str(whole)}
    check_model("critic", str(copy), **critic)
    assert "missing lm_head.weight" in refusal(copy, tokenizer_of=str(whole))
    save_file({k: v for k, v in tensors.items() if k != NORM}, file, metadata={"format": "pt"})
    assert f"missing {NORM}" in refusal(copy, **critic)
    LlamaForCausalLM(LlamaConfig(**SIZES | {"vocab_size": 256, "pad_token_id": 0})
                     ).save_pretrained(copy)  # fmt: skip
    entry("generation_config.json", "eos_token_id", 0)(copy)
    assert "ids up to 256 over an embedding of 256 rows" in refusal(copy, **critic)


def test_a_model_unknown_to_transformers_passes_only_for_engines(copy: Path) -> None:
    """For example an encoder-decoder model, which cannot be trained."""
    gone("model*")(copy)
    small = {"d_model": 16, "d_ff": 16, "d_kv": 4, "num_layers": 1, "num_heads": 4}
    T5ForConditionalGeneration(T5Config(vocab_size=ROWS, **small)).save_pretrained(copy)
    check_model("model", str(copy), by_transformers=False)
    assert "T5Config" in refusal(copy)


def test_an_unknown_hub_name_is_refused(no_network: None) -> None:
    """In one line, without network access."""
    with pytest.raises(ModelError, match="nobody/nothing") as caught:
        load_tokenizer("nobody/nothing")
    assert "\n" not in str(caught.value)


def test_tokenizer_identity_depends_on_behaviour(copy: Path, whole: Path) -> None:
    """It does not depend on how the files are written; the template has its own fingerprint."""

    def identity() -> dict[str, str]:
        return tokenizer_identity(load_tokenizer(str(copy)))

    first = identity()
    seen = [first]
    AutoTokenizer.from_pretrained(copy).save_pretrained(copy)
    assert identity() == first
    (copy / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert identity() == {**first, "chat_template": identity()["chat_template"]} != first
    shutil.copy(whole / "chat_template.jinja", copy)
    for change in (
        lambda x: x["model"]["vocab"].update(Wh=ROWS),
        lambda x: x.update(normalizer={"type": "Lowercase"}),
        lambda x: x["added_tokens"].append({**x["added_tokens"][0], "id": ROWS, "content": "<x>"}),
        lambda x: (x["model"]["vocab"].update(Wh=ROWS), x["model"].update(merges=[["W", "h"]])),
    ):
        shutil.copy(whole / "tokenizer.json", copy)
        in_tokenizer(change)(copy)
        assert identity() not in seen
        assert identity()["chat_template"] == first["chat_template"]
        seen.append(identity())


@pytest.mark.parametrize("name", [
    "model.safetensors", "pytorch_model.bin", "model-00002-of-2.safetensors",
])  # fmt: skip
def test_other_weights_inside_a_file_have_another_fingerprint(tmp_path: Path, name: str) -> None:
    """Also if both ends of the file are the same: here 1 % of each of 40 layers has changed."""
    content = bytearray(24 << 20)
    (tmp_path / name).write_bytes(content)
    first = weights_fingerprint(str(tmp_path))
    earlier = weights_fingerprint(str(tmp_path), "9a38")
    for layer in range(40):
        start = (2 << 20) + layer * (20 << 20) // 40
        content[start : start + (20 << 20) // 4000] = b"x" * ((20 << 20) // 4000)
    (tmp_path / name).write_bytes(content)
    second = weights_fingerprint(str(tmp_path))
    assert first != second and weights_fingerprint(str(tmp_path), first) == second
    assert first.rpartition(":")[0] == second.rpartition(":")[0]  # of names and sizes
    assert weights_fingerprint(str(tmp_path), "9a38") == earlier  # as it was compared before
    (tmp_path / name).rename(tmp_path / f"other-{name}")
    third = weights_fingerprint(str(tmp_path))
    assert third.rpartition(":")[0] != second.rpartition(":")[0]


def test_a_model_without_local_files_is_its_own_fingerprint(tmp_path: Path) -> None:
    """In either form, whatever else is in its folder."""
    (tmp_path / "training_args.bin").write_bytes(b"x")
    for base in ("Qwen/Qwen2.5-3B", str(tmp_path)):
        assert {weights_fingerprint(base, like) for like in (None, "2:", "9a38")} == {base}
