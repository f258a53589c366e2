"""The encoder interface, which turns text into vectors, and `open_encoder`, which selects one.

torch and transformers are imported only when a model is opened, so that BM25 needs neither.
"""

import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from search_r1.retrieval.encoders.cuts import Cuts
from search_r1.retrieval.encoders.families import Vectors, family_of, model_folder, model_name
from search_r1.retrieval.errors import SetupError, install_command
from search_r1.retrieval.settings import EncoderConfig


class Encoder(Protocol):
    """Embeds queries and passages into one vector space, to be compared by inner product."""

    name: str
    pooling: str
    normalizes: bool
    """Whether vectors have unit length."""
    query_prefix: str
    passage_prefix: str

    def encode_queries(self, queries: Sequence[str]) -> Vectors:
        """Return contiguous float32 vectors (num_queries, dim) in the order of `queries`."""

    def encode_passages(self, passages: Sequence[str]) -> Vectors:
        """Return contiguous float32 vectors (num_passages, dim) in the order of `passages`."""

    def info(self) -> dict[str, Any]:
        """Return JSON-ready facts that determine the vectors: name, pooling, dtype ..."""


class HashEncoder:
    """Bag of words with hashed dimensions: an encoder without a model, for trials and tests."""

    name = "hash"
    pooling = "sum"
    normalizes = True
    query_prefix = ""
    passage_prefix = ""

    def __init__(self, dim: int = 64) -> None:
        self._dim = dim

    def encode_queries(self, queries: Sequence[str]) -> Vectors:
        if not queries:
            return np.zeros((0, self._dim), dtype=np.float32)
        return np.stack([self._encode(query) for query in queries])

    encode_passages = encode_queries

    def info(self) -> dict[str, Any]:
        return {"name": self.name, "dim": self._dim}

    def _encode(self, text: str) -> Vectors:
        vector = np.zeros(self._dim, dtype=np.float32)
        for word in re.findall(r"\w+", text.lower()):
            vector[zlib.crc32(word.encode()) % self._dim] += 1
        norm = float(np.linalg.norm(vector))
        return vector / np.float32(norm) if norm else vector


class PairEncoder:
    """Two encoders of one vector space, one for queries and one for passages, as in DPR."""

    def __init__(self, queries: Encoder, passages: Encoder) -> None:
        """Raises SetupError if their vectors cannot be compared."""
        self._queries, self._passages = queries, passages
        self.name = passages.name
        self.pooling, self.normalizes = passages.pooling, passages.normalizes
        self.query_prefix, self.passage_prefix = queries.query_prefix, passages.passage_prefix
        self.has_prompts = any(getattr(e, "has_prompts", False) for e in (queries, passages))
        self.cuts = (*cuts_of(queries)[:1], *cuts_of(passages)[1:])
        dims = [len(e.encode_passages(["a"])[0]) for e in (queries, passages)]
        if dims[0] != dims[1] or queries.normalizes != passages.normalizes:
            raise SetupError(
                f"--query_model {queries.name} gives {_describe(queries, dims[0])}, but "
                f"--retriever_model {passages.name} {_describe(passages, dims[1])}; expected two "
                "encoders that were trained together"
            )

    def encode_queries(self, queries: Sequence[str]) -> Vectors:
        return self._queries.encode_queries(queries)

    def encode_passages(self, passages: Sequence[str]) -> Vectors:
        return self._passages.encode_passages(passages)

    def info(self) -> dict[str, Any]:
        return {"queries": self._queries.info(), "passages": self._passages.info()}


def cuts_of(encoder: Encoder) -> tuple[Cuts, ...]:
    """Return what an encoder counts of queries and of passages; nothing if it has no limit."""
    return getattr(encoder, "cuts", ())


def open_encoder(config: EncoderConfig, max_length: int | None = None) -> Encoder:
    """Open the configured encoder; `max_length`: tokens of a passage. Raises SetupError."""
    passages = _open_checked(config, config.retriever_model, max_length)
    if config.query_model is None:
        return passages
    return PairEncoder(_open_checked(config, config.query_model, max_length), passages)


def _open_checked(config: EncoderConfig, path: str | None, max_length: int | None) -> Encoder:
    """Open one model's encoder and check that it computes finite vectors."""
    assert path is not None, "the caller checks that a model is named"
    encoder = _load(config, path, max_length)
    # A passage: DPR's passage encoder takes no queries.
    if not np.isfinite(encoder.encode_passages(["a"])).all():
        raise SetupError(
            f"encoder {encoder.name}: got a vector that is not finite, expected numbers; fix: "
            "download the model again, or compute in float32"
        )
    return encoder


def _load(config: EncoderConfig, path: str, max_length: int | None) -> Encoder:
    kind, _, dim = path.partition(":")
    if kind == HashEncoder.name:
        if config.pooling_method not in (None, HashEncoder.pooling):
            raise SetupError(
                f"--pooling_method {config.pooling_method}, but {path} declares "
                f"{HashEncoder.pooling!r}; leave the option out"
            )
        if not re.fullmatch("[1-9][0-9]{0,4}", dim or "64"):
            raise SetupError(
                f"encoder {path}: got {dim!r} dimensions, expected 1 to 99999; fix: hash or hash:64"
            )
        return HashEncoder(int(dim or 64))
    if path.endswith(".onnx"):
        return _load_onnx(config, Path(path), max_length)
    family = family_of(model_name(path), config.encoder_family)
    is_passages = path == config.retriever_model
    flag = "retriever_model (of index_builder --model_path)" if is_passages else "query_model"
    try:
        from search_r1.retrieval.encoders.model_name import check_model_name  # noqa: PLC0415

        check_model_name(flag, path)  # before torch, which takes seconds to import
        from search_r1.retrieval.encoders.static import open_static  # noqa: PLC0415

        if (static := open_static(path, family, config)) is not None:
            return static
        from search_r1.retrieval.encoders.loading import explain_load_errors  # noqa: PLC0415
        from search_r1.retrieval.encoders.sentence import SentenceEncoder  # noqa: PLC0415
    except ImportError as error:
        raise SetupError(
            f"dense retrieval needs torch and sentence-transformers ({error}); "
            f"install them: {install_command('dense')}"
        ) from error
    with explain_load_errors(flag, path):
        return SentenceEncoder(path, family, config, max_length)


def _load_onnx(config: EncoderConfig, file: Path, max_length: int | None) -> Encoder:
    try:
        from search_r1.retrieval.encoders import onnx  # noqa: PLC0415 by name
    except ImportError as error:
        raise SetupError(
            f"{file} needs ONNX Runtime ({error}); install it: {install_command('onnx')}"
        ) from error
    family = family_of(model_name(str(model_folder(file))), config.encoder_family)
    return onnx.OnnxEncoder(file, family, config, max_length)


def _describe(encoder: Encoder, dim: int) -> str:
    return f"{dim} dimensions, {'' if encoder.normalizes else 'not '}normalised"
