"""Static encoders from a folder, in numpy: the mean of the tokens' rows, at unit length.

`sentence` computes the same vectors, for hub names, devices and dtypes too, but imports torch and
transformers, which takes longer than all else that a server of such an encoder does at its start.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from search_r1.retrieval.encoders.cuts import Cuts
from search_r1.retrieval.encoders.families import Family, Vectors, model_name
from search_r1.retrieval.settings import EncoderConfig

KINDS = ["StaticEmbedding", "Normalize"]
TABLE = "embedding.weight"


class StaticEncoder:
    """Embeds by a table of tokens; as many tokens as a text has."""

    pooling = "modules"
    normalizes = True
    is_static = True

    def __init__(
        self, name: str, family: Family, config: EncoderConfig, tokenizer: Tokenizer, table: Vectors
    ) -> None:
        """`table` (num_tokens, dim): its rows are those of the tokenizer's ids."""
        tokenizer.no_padding()
        self.name, self._tokenizer, self._table = name, tokenizer, table
        self.query_prefix, self.passage_prefix = family.query_prefix, family.passage_prefix
        # A static encoder has no limit: no text is cut.
        self._query_length, self.cuts = config.query_max_length, (Cuts("queries"), Cuts("passages"))

    def encode_queries(self, queries: Sequence[str]) -> Vectors:
        return self._encode(queries, self.query_prefix)

    def encode_passages(self, passages: Sequence[str]) -> Vectors:
        return self._encode(passages, self.passage_prefix)

    def _encode(self, texts: Sequence[str], prefix: str) -> Vectors:
        rows = self._tokenizer.encode_batch([prefix + x for x in texts], add_special_tokens=False)
        vectors = np.zeros((len(texts), self._table.shape[1]), dtype=np.float32)
        for vector, row in zip(vectors, rows, strict=True):
            if row.ids:
                self._table[row.ids].mean(axis=0, out=vector)
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return vectors

    def info(self) -> dict[str, Any]:
        """Return the facts that `sentence` gives, so that a run may change between them."""
        head = f"0.{TABLE} {self._table.shape}".encode()
        sample = self._table.reshape(-1)[:64].tobytes()
        return {
            "name": self.name,
            "pooling": self.pooling,
            "normalizes": self.normalizes,
            "dtype": "float32",
            "query_prefix": self.query_prefix,
            "passage_prefix": self.passage_prefix,
            "query_max_length": self._query_length,
            "weights": hashlib.blake2b(head + sample, digest_size=8).hexdigest(),
        }


def open_static(path: str, family: Family, config: EncoderConfig) -> StaticEncoder | None:
    """Return the encoder of a folder, or None for one of another kind, and for other options.

    A folder that cannot be read is none either: `sentence` says what it lacks.
    """
    asked = (config.pooling_method, config.encoder_dtype, config.encoder_device or "cpu")
    if asked != (None, "float32", "cpu"):
        return None
    try:
        modules = json.loads((Path(path) / "modules.json").read_text())
        kinds = [module["type"].rpartition(".")[2] for module in modules]
        settings = Path(path) / "config_sentence_transformers.json"
        prompts = json.loads(settings.read_text()).get("prompts") if settings.exists() else None
        if kinds != KINDS or any((prompts or {}).values()):
            return None
        folder = Path(path) / modules[0]["path"]
        with safe_open(folder / "model.safetensors", framework="numpy") as weights:
            table = weights.get_tensor(TABLE)
        text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, SafetensorError):
        return None
    if table.dtype != np.float32:
        return None
    tokenizer = Tokenizer.from_str(text)
    return StaticEncoder(model_name(path), family, config, tokenizer, table)
