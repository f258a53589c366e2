"""Broken model folders, each made by one change of a small complete model."""

# ruff: noqa: E501 - a table reads best with a case a line
from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from example.tiny import tiny_llama

TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
INDEX = "model.safetensors.index.json"
NORM, UP = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"


def whole_model(
    folder: Path, max_shard_size: int = 20_000, seed: int = 0, hidden_size: int = 16
) -> Path:
    """Save a complete model: two layers, by default two files, byte tokenizer, chat template.

    It is loaded in a moment, unlike `example.tiny.tiny_model`, whose tokenizer has 49,152 words.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(alphabet)} | {"</s>": len(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>", chat_template=TEMPLATE
    ).save_pretrained(folder)
    lm = tiny_llama(len(vocab), hidden_size=hidden_size, eos_token_id=len(alphabet), seed=seed)
    lm.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


Change = Callable[[Path], object]


def text(name: str, content: str) -> Change:
    """Replace the content of a file."""
    return lambda folder: (folder / name).write_text(content)


def entry(name: str, key: str, value: Any) -> Change:
    """Replace a value of a JSON file."""
    return lambda folder: edit(folder / name, lambda found: {**found, key: value})


def edit(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    file.write_text(json.dumps(change(json.loads(file.read_text()))))


def gone(*names: str) -> Change:
    """Delete files by pattern."""

    def remove(folder: Path) -> None:
        for name in names:
            for file in folder.glob(name):
                file.unlink()

    return remove


def config(key: str, value: Any) -> Change:
    return entry("config.json", key, value)


def template(content: str) -> Change:
    return text("chat_template.jinja", content)


def weights(change: Callable[[dict[str, Tensor]], object]) -> Change:
    """Change the tensors and write them to one file."""

    def rewrite(folder: Path) -> None:
        tensors: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            tensors |= load_file(file)
        gone("model*")(folder)
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return rewrite


def bytes_of(pattern: str, change: Callable[[bytes], bytes]) -> Change:
    """Change the bytes of the first file that matches `pattern`."""

    def rewrite(folder: Path) -> None:
        file = sorted(folder.glob(pattern))[0]
        file.write_bytes(change(file.read_bytes()))

    return rewrite


def index(change: Callable[[dict[str, Any]], Any]) -> Change:
    return lambda folder: edit(folder / INDEX, change)


def directory(name: str) -> Change:
    """Replace a file by a folder."""

    def make(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return make


def tokenizer(change: Callable[[dict[str, Any]], Any]) -> Change:
    return lambda folder: edit(folder / "tokenizer.json", change)


def in_tokenizer(change: Callable[[dict[str, Any]], object]) -> Change:
    """Change `tokenizer.json` in place, without using the result of `change`."""
    return tokenizer(lambda found: (change(found), found)[1])


def renamed(tensors: dict[str, Tensor], old: str, new: str) -> None:
    for name in [name for name in tensors if old in name]:
        tensors[name.replace(old, new)] = tensors.pop(name)


def old_format(folder: Path) -> None:
    """Replace the weights by a file in torch's older format that lacks a tensor."""
    weights(lambda tensors: tensors.pop(UP))(folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def pickled(folder: Path) -> None:
    """Replace the weights by a pickle that would execute code when it is read."""
    gone("model*")(folder)
    torch.save({NORM: Path("x")}, folder / "pytorch_model.bin")


SHARD = "model-00001-of-00002.safetensors"
ONE = weights(lambda tensors: None)


def then(*changes: Change) -> Change:
    return lambda folder: [change(folder) for change in changes]


BAD: Mapping[str, tuple[Change, str]] = {
    # not a model at all
    "empty folder": (gone("*"), "without config.json"),
    "no config": (gone("config.json"), "without config.json"),
    "no weights": (gone("model*"), "weights: "),
    "only an index": (gone("*.safetensors"), "weights: "),
    "a git pointer as weights": (then(ONE, text("model.safetensors", "version https://git-lfs")), "model.safetensors"),
    # config.json
    "config empty": (text("config.json", ""), "config.json: "),
    "config no JSON": (text("config.json", "{'a': 1}"), "config.json: "),
    "config cut": (bytes_of("config.json", lambda x: x[:100]), "config.json: "),
    "config no object": (text("config.json", "[1, 2]"), "config.json: "),
    "config null": (text("config.json", "null"), "config.json: "),
    "config no text": (bytes_of("config.json", lambda x: b"\xff\xfe\x00" + x), "config.json: "),
    "config nested deeply": (text("config.json", "[" * 100_000), "config.json: "),
    "config a folder": (directory("config.json"), "without config.json"),
    "config without kind": (text("config.json", "{}"), "config.json: "),
    "config of unknown kind": (config("model_type", "nonsense"), "config.json: "),
    "config of another kind": (config("model_type", "gpt2"), "missing lm_head"),
    "config of no decoder": (config("model_type", "t5"), "T5Config"),
    "config with code": (then(config("model_type", "own"), config("auto_map", {"AutoConfig": "m.C", "AutoModelForCausalLM": "m.M"})), "config.json: "),
    "config kind a number": (config("model_type", 5), "config.json: "),
    "quantized": (config("quantization_config", {"quant_method": "awq", "bits": 4}), "quantized (awq)"),
    "layers 4 over 2": (config("num_hidden_layers", 4), "missing model.layers.2"),
    "layers 1 over 2": (config("num_hidden_layers", 1), "unexpected model.layers.1"),
    "layers 0": (config("num_hidden_layers", 0), "unexpected"),
    "layers -1": (config("num_hidden_layers", -1), "unexpected"),
    "layers a word": (config("num_hidden_layers", "two"), "config.json: "),
    "heads 0": (config("num_attention_heads", 0), "config.json: "),
    "heads 3": (config("num_attention_heads", 3), "config.json: "),
    "key heads 3": (config("num_key_value_heads", 3), "shape of"),
    "hidden 0": (config("hidden_size", 0), "shape of"),
    "hidden half": (config("hidden_size", 8), "shape of"),
    "hidden null": (config("hidden_size", None), "config.json: "),
    "hidden a googol": (config("hidden_size", 10**100), "Overflow"),
    "vocabulary smaller in config": (config("vocab_size", 100), "Padding_idx"),
    "vocabulary -5": (config("vocab_size", -5), "Padding_idx"),
    "activation unknown": (config("hidden_act", "wobble"), "weights: KeyError: 'wobble'"),
    "rope of unknown kind": (config("rope_parameters", {"rope_type": "wobble", "rope_theta": 1.0}), "weights: KeyError: 'wobble'"),
    "epsilon a word": (config("rms_norm_eps", "small"), "config.json: "),
    "head not tied and not there": (config("tie_word_embeddings", False), "missing lm_head.weight"),
    # names and shapes of tensors
    "a tensor lacks": (weights(lambda x: x.pop(UP)), f"missing {UP} (1 in all)"),
    "a tensor too many": (weights(lambda x: x.update(extra=torch.ones(3))), "unexpected extra"),
    "an adapter inside": (weights(lambda x: x.update({UP.replace("weight", "lora_A.weight"): torch.ones(2, 16)})), "unexpected"),
    "a value head": (weights(lambda x: x.update({"v_head.summary.weight": torch.ones(1, 16)})), "unexpected v_head"),
    "names of another": (weights(lambda x: renamed(x, "mlp.", "ffn.")), "missing"),
    "a name misspelt": (weights(lambda x: renamed(x, NORM, "model.norm.wieght")), "missing model.norm.weight"),
    "names behind a wrapper": (weights(lambda x: renamed(x, "model.", "module.model.")), "weights: "),
    "no tensor at all": (weights(lambda x: x.clear()), "missing"),
    "a tensor transposed": (weights(lambda x: x.update({UP: x[UP].T.contiguous()})), f"shape of {UP}"),
    "a tensor flat": (weights(lambda x: x.update({UP: x[UP].flatten()})), f"shape of {UP}"),
    "a tensor empty": (weights(lambda x: x.update({NORM: torch.ones(0)})), f"shape of {NORM}"),
    "an embedding cut": (weights(lambda x: x.update({"model.embed_tokens.weight": torch.ones(200, 16)})), "shape of"),
    "whole numbers": (weights(lambda x: x.update({UP: x[UP].to(torch.int8)})), "no floating-point numbers"),
    "8-bit floats without scales": (weights(lambda x: x.update({UP: x[UP].to(torch.float8_e4m3fn)})), "no floating-point numbers"),
    "truth values": (weights(lambda x: x.update({NORM: x[NORM] > 0})), "no floating-point numbers"),
    # damaged files of weights
    "weights empty": (then(ONE, bytes_of("model.safetensors", lambda x: b"")), "model.safetensors"),
    "weights cut in the header": (then(ONE, bytes_of("model.safetensors", lambda x: x[:50])), "model.safetensors"),
    "weights cut": (then(ONE, bytes_of("model.safetensors", lambda x: x[:-1])), "model.safetensors"),
    "weights too long": (then(ONE, bytes_of("model.safetensors", lambda x: x + b"\0" * 8)), "model.safetensors"),
    "weights zeros": (then(ONE, bytes_of("model.safetensors", lambda x: bytes(len(x)))), "model.safetensors"),
    "header a lie": (then(ONE, bytes_of("model.safetensors", lambda x: b"\xff" * 8 + x[8:])), "model.safetensors"),
    "header no JSON": (then(ONE, bytes_of("model.safetensors", lambda x: x[:8] + b"}" + x[9:])), "model.safetensors"),
    "weights a folder": (then(ONE, directory("model.safetensors")), "model.safetensors"),
    "a web page as weights": (then(ONE, text("model.safetensors", "<html>404</html>")), "model.safetensors"),
    "a shard cut": (bytes_of(SHARD, lambda x: x[:-100]), SHARD),
    "a shard lacks": (gone(SHARD), "weights: "),
    "a shard twice": (lambda folder: shutil.copy(folder / SHARD, folder / SHARD.replace("1-of", "2-of")), "missing"),
    "old format that lacks one": (old_format, f"missing {UP}"),
    "old format that acts": (pickled, "weights: "),
    "old format cut": (then(old_format, bytes_of("pytorch_model.bin", lambda x: x[:500])), "weights: "),
    # the index
    "index empty": (text(INDEX, ""), "weights: "),
    "index no JSON": (text(INDEX, "{"), "weights: "),
    "index without map": (index(lambda x: {"metadata": {}}), "weights: "),
    "index a list": (index(lambda x: []), "weights: "),
    "index names a missing file": (index(lambda x: {**x, "weight_map": x["weight_map"] | {"x": "model-9.safetensors"}}), "weights: "),
    "index names one file only": (index(lambda x: {**x, "weight_map": {UP: SHARD}}), "missing"),
    "index points outside": (index(lambda x: {**x, "weight_map": x["weight_map"] | {"x": "../../x.safetensors"}}), "weights: "),
    "index of numbers": (index(lambda x: {**x, "weight_map": {UP: 5}}), "weights: "),
    "one file beside an index": (lambda folder: shutil.copy(folder / SHARD, folder / "model.safetensors"), "only one of them is read"),
    # the tokenizer
    "no tokenizer": (gone("tokenizer*"), "tokenizer: "),
    "no tokenizer.json": (gone("tokenizer.json"), "tokenizer: "),
    "tokenizer empty": (text("tokenizer.json", ""), "tokenizer: "),
    "tokenizer no JSON": (text("tokenizer.json", "{"), "tokenizer: "),
    "tokenizer of null": (text("tokenizer.json", "null"), "tokenizer: "),
    "tokenizer without model": (tokenizer(lambda x: {k: v for k, v in x.items() if k != "model"}), "tokenizer: "),
    "tokenizer of unknown kind": (tokenizer(lambda x: {**x, "model": {**x["model"], "type": "ABC"}}), "tokenizer: "),
    "tokenizer without words": (tokenizer(lambda x: {**x, "added_tokens": [], "model": {**x["model"], "vocab": {}, "merges": []}}), "tokenizer: "),
    "tokenizer with merges of nothing": (tokenizer(lambda x: {**x, "model": {**x["model"], "merges": [["no", "such"]]}}), "tokenizer: "),
    "tokenizer with too large an id": (tokenizer(lambda x: {**x, "model": {**x["model"], "vocab": {**x["model"]["vocab"], "zz": 999}}}), "ids up to 999"),
    "tokenizer with tokens added": (tokenizer(lambda x: {**x, "added_tokens": [*x["added_tokens"], {**x["added_tokens"][0], "id": 300, "content": "<extra>", "special": False}]}), "ids up to"),
    "tokenizer settings no JSON": (text("tokenizer_config.json", "{"), "tokenizer: "),
    "tokenizer settings a list": (text("tokenizer_config.json", "[]"), "tokenizer: "),
    "tokenizer with code": (then(gone("tokenizer.json"), entry("tokenizer_config.json", "auto_map", {"AutoTokenizer": ["m.T", None]})), "tokenizer: "),
    "tokenizer a folder": (directory("tokenizer.json"), "tokenizer: "),
    # how it ends, and the chat template
    "sampling defaults no JSON": (text("generation_config.json", "{"), "generation_config.json: "),
    "sampling defaults a list": (text("generation_config.json", "[1]"), "generation_config.json: "),
    "end beyond the vocabulary": (entry("generation_config.json", "eos_token_id", 99999), "eos_token_id=99999"),
    "end below 0": (entry("generation_config.json", "eos_token_id", [-7]), "eos_token_id=-7"),
    "end a word": (entry("generation_config.json", "eos_token_id", "</s>"), "eos_token_id='</s>'"),
    "template that raises": (template("{{ raise_exception('no') }}"), "chat template: "),
    "template no Jinja": (template("{% for m in messages %}"), "chat template: "),
    "template of an unknown filter": (template("{{ messages | wobble }}"), "chat template: "),
    "template that reaches out": (template("{{ messages.__class__.__mro__[1].__subclasses__() }}"), "SecurityError"),
    "template that calls itself": (template("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"), "chat template: "),
    "template that leaves the question out": (template("Hello"), "leaves the user's words out"),
    "template empty": (template("{# nothing #}"), "leaves the user's words out"),
    "template a number": (then(gone("chat_template.jinja"), entry("tokenizer_config.json", "chat_template", 5)), "chat template: "),
    "template a list": (then(gone("chat_template.jinja"), entry("tokenizer_config.json", "chat_template", [1])), "tokenizer: "),
    "template no text": (bytes_of("chat_template.jinja", lambda x: b"\xff\xfe\xff"), "tokenizer: "),
}  # fmt: skip
"""By name: the change of the model, and a part of the one-line error that it causes."""
