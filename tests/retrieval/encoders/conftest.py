"""Tiny random models on disk, in the layout of the hub and of sentence-transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    BertTokenizerFast,
    DPRConfig,
    DPRContextEncoder,
    DPRQuestionEncoder,
)

WORDS = "query passage : the a river city capital of france austria who is where what one two , ."
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS.split()]
SIZES = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 48,
}


def save_tokenizer(folder: Path) -> None:
    """Save a word-piece tokenizer with the words of WORDS."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {word: i for i, word in enumerate(VOCABULARY)}
    BertTokenizerFast(vocabulary, model_max_length=48).save_pretrained(folder)


def save_model(folder: Path, kind: str) -> Path:
    """Save a random `bert`, or a dpr encoder (`context` or `question`) with a projection."""
    torch.manual_seed(len(kind))
    save_tokenizer(folder)
    if kind == "bert":
        BertModel(BertConfig(**SIZES)).save_pretrained(folder)
    else:
        encoder = DPRContextEncoder if kind == "context" else DPRQuestionEncoder
        encoder(DPRConfig(**SIZES, projection_dim=8)).save_pretrained(folder)
    return folder


def add_modules(folder: str, pooling: dict[str, Any], *kinds: str, **prompts: str) -> None:
    """Add a modules.json with a transformer and further modules of the given kinds."""
    rows = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for i, kind in enumerate(kinds, 1):
        path = f"{i}_{kind}"
        type_ = f"sentence_transformers.models.{kind}"
        rows.append({"idx": i, "name": str(i), "path": path, "type": type_})
        (Path(folder) / path).mkdir()
    facts = {"word_embedding_dimension": 32, **pooling}
    write(Path(folder) / "1_Pooling" / "config.json", facts)
    write(Path(folder) / "modules.json", rows)
    write(
        Path(folder) / "sentence_bert_config.json", {"max_seq_length": 24, "do_lower_case": False}
    )
    write(Path(folder) / "config_sentence_transformers.json", {"prompts": prompts})


def write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[..., str]:
    """Return a function that saves a tiny model under a name and returns its folder."""
    return lambda name, kind="bert": str(save_model(tmp_path / name, kind))


@pytest.fixture
def declare() -> Callable[..., None]:
    """Return `add_modules`, which turns a plain checkpoint into a sentence-transformers folder."""
    return add_modules
