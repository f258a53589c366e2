"""Encoders in ONNX files, run by ONNX Runtime on a CPU: without torch and transformers.

Importing those takes longer than all else that a dense server does at its start. A file lies in a
model folder, as `onnx/model.onnx` of many models on the hub; pooling, prefixes and lengths are
those that `sentence` reads in the same folder. `onnx_export` writes one, also in int8.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as runtime
from tokenizers import Tokenizer

from search_r1.retrieval.encoders.cuts import Cuts
from search_r1.retrieval.encoders.families import (
    Family,
    Vectors,
    input_limit,
    model_folder,
    model_name,
)
from search_r1.retrieval.errors import SetupError
from search_r1.retrieval.settings import EncoderConfig
from verl.errors import explain
from verl.machine import num_threads

BATCH = 16
"""Default texts per call; larger batches only add padding."""
STATES = ("last_hidden_state", "token_embeddings")
"""Names of the output with the states of the tokens."""
KINDS = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])
POOLINGS = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token"}
PROMPTS = (("query",), ("passage", "document", "corpus"))
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, runtime.Fail,
              runtime.InvalidProtobuf, runtime.InvalidGraph, runtime.NoSuchFile)  # fmt: skip


class OnnxEncoder:
    """An encoder from an ONNX file and the tokenizer and settings of its model folder."""

    def __init__(self, file: Path, family: Family, config: EncoderConfig, max_length: int | None):
        """Load the file; `max_length`: tokens of a passage. Raises SetupError."""
        _check_options(file, config)
        folder = model_folder(file)
        self.name = model_name(str(folder))
        try:
            self._read_folder(folder, family, config.pooling_method, max_length, config)
            self._tokenizer = _open_tokenizer(folder / "tokenizer.json")
            self._session = _open_session(file)
        except UNREADABLE as error:
            got = f"{file}, which cannot be read ({type(error).__name__}: {error})"
            expected = "an ONNX file in a complete model folder with tokenizer.json"
            fix = "python -m search_r1.retrieval.encoders.onnx_export FOLDER"
            raise SetupError(explain("--retriever_model", got, expected, fix)) from error
        self._inputs = {node.name for node in self._session.get_inputs()}
        outputs = [node.name for node in self._session.get_outputs()]
        self._output = next((name for name in STATES if name in outputs), "")
        if not self._output:
            fix = "export the model without its pooling"
            raise SetupError(explain(f"outputs of {file}", outputs, " or ".join(STATES), fix))
        self._tokenizer.no_padding()  # batches are made of rows of similar lengths
        self._batch_size = config.encoder_batch_size or BATCH
        self._digest = _digest(file)

    def _read_folder(
        self, folder: Path, family: Family, pooling: str | None, max_length: int | None,
        config: EncoderConfig,
    ) -> None:  # fmt: skip
        """Take over what the folder declares, or else the family."""
        self.query_prefix, self.passage_prefix = family.query_prefix, family.passage_prefix
        self.normalizes, declared = family.normalizes, family.pooling
        if (folder / "modules.json").exists():
            modules = _json(folder / "modules.json")
            kinds = [module["type"].rpartition(".")[2] for module in modules]
            if kinds not in KINDS:
                raise ValueError(f"modules {kinds}, expected one of {KINDS}")
            self.normalizes = len(kinds) == len(KINDS[1])
            declared = _pooling_of(_json(folder / modules[1]["path"] / "config.json"))
        settings = _json(folder / "config_sentence_transformers.json", {})
        found = [_prompt(settings.get("prompts") or {}, names) for names in PROMPTS]
        self.has_prompts = any(found)
        if self.has_prompts:
            self.query_prefix, self.passage_prefix = found
        if (pooling or declared) not in POOLINGS or (declared and pooling not in (None, declared)):
            raise ValueError(f"pooling {pooling or declared}, expected {declared or 'mean or cls'}")
        self.pooling = str(pooling or declared)
        limit = _longest_input(folder)
        length = _json(folder / "sentence_bert_config.json", {}).get("max_seq_length") or limit
        queries = min(config.query_max_length, limit)
        self.cuts = (
            Cuts("queries", queries, "--query_max_length"),
            Cuts("passages", min(max_length or length, limit)),
        )

    def encode_queries(self, queries: Sequence[str]) -> Vectors:
        return self._encode(queries, self.query_prefix, self.cuts[0])

    def encode_passages(self, passages: Sequence[str]) -> Vectors:
        return self._encode(passages, self.passage_prefix, self.cuts[1])

    def info(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "pooling": self.pooling,
            "normalizes": self.normalizes,
            "dtype": "onnx",
            "query_prefix": self.query_prefix,
            "passage_prefix": self.passage_prefix,
            "query_max_length": self.cuts[0].limit,
            "weights": self._digest,
        }

    def _encode(self, texts: Sequence[str], prefix: str, cuts: Cuts) -> Vectors:
        """Embed in batches of texts of similar length; returns vectors in the order of `texts`."""
        if not texts:
            return self._encode(["a"], prefix, cuts)[:0]
        self._tokenizer.enable_truncation(cuts.limit)
        rows = self._tokenizer.encode_batch([prefix + text for text in texts])
        cuts.add(len(rows), sum(bool(row.overflowing) for row in rows))
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i].ids))
        parts = [order[i : i + self._batch_size] for i in range(0, len(order), self._batch_size)]
        vectors = [self._pool(*_pad([rows[i].ids for i in part])) for part in parts]
        result = np.empty((len(texts), vectors[0].shape[1]), dtype=np.float32)
        result[order] = np.concatenate(vectors)
        return result

    def _pool(self, ids: Any, mask: Any) -> Vectors:
        """Return a vector for each row of `ids` (batch, tokens); `mask`: 1 where there is one."""
        given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        sent = {name: value for name, value in given.items() if name in self._inputs}
        [states] = self._session.run([self._output], sent)  # (batch, tokens, dim)
        states = states.astype(np.float32, copy=False)
        if self.pooling == "cls":
            vectors: Vectors = states[:, 0]
        else:
            vectors = np.einsum("btd,bt->bd", states, mask.astype(np.float32))
            vectors /= mask.sum(axis=1, keepdims=True, dtype=np.float32)
        if self.normalizes:
            vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return vectors


def _check_options(file: Path, config: EncoderConfig) -> None:
    asked = {"encoder_dtype": config.encoder_dtype, "encoder_device": config.encoder_device}
    for (flag, value), allowed in zip(asked.items(), (("float32",), (None, "cpu")), strict=True):
        if value not in allowed:
            expected = "a file that computes on a CPU in its own precision"
            fix = f"leave it out, or give --retriever_model {model_folder(file)}"
            raise SetupError(explain(f"--{flag}", f"{value} with {file}", expected, fix))


def _open_tokenizer(file: Path) -> Tokenizer:
    try:
        return Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{file}: {error}") from error


def _open_session(file: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    # The cores that torch would take, too; and threads that wait sleep, beside those of a search.
    options.intra_op_num_threads = num_threads()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def _pad(rows: Sequence[Sequence[int]]) -> tuple[Any, Any]:
    """Return ids and mask (batch, tokens); the id of padding is never looked at."""
    lengths = np.array([len(row) for row in rows])
    mask = (np.arange(lengths.max()) < lengths[:, None]).astype(np.int64)
    ids = np.zeros(mask.shape, dtype=np.int64)
    ids[mask == 1] = np.concatenate([np.asarray(row, dtype=np.int64) for row in rows])
    return ids, mask


def _json(path: Path, default: Any = None) -> Any:
    if default is not None and not path.exists():
        return default
    return json.loads(path.read_text(encoding="utf-8"))


def _pooling_of(config: dict[str, Any]) -> str:
    """Return the only pooling that a module declares. Raises ValueError for any other."""
    on = [name for name, value in config.items() if name.startswith("pooling_mode_") and value]
    for name, flag in POOLINGS.items():
        if on == [flag] or (not on and config.get("pooling_mode") == name):
            return name
    raise ValueError(f"pooling {on or config.get('pooling_mode')}, expected mean or cls")


def _prompt(prompts: dict[str, str], names: Sequence[str]) -> str:
    return next((prompts[name] for name in names if prompts.get(name)), "")


def _longest_input(folder: Path) -> int:
    """Return the maximum number of input tokens of the model."""
    config = _json(folder / "config.json")
    limit = int(_json(folder / "tokenizer_config.json", {}).get("model_max_length", 512))
    facts = (config.get(name) for name in ("max_position_embeddings", "model_type", "pad_token_id"))
    return input_limit(limit, *facts)


def _digest(file: Path) -> str:
    """Return a 64-bit hash (hex) of the file, so that precisions and trainings stay apart."""
    with file.open("rb") as data:
        hasher = hashlib.file_digest(data, lambda: hashlib.blake2b(digest_size=8))
    return hasher.hexdigest()
