"""Text to vectors: what an encoder is, and the choice of one.

torch and transformers are loaded only when a model is opened, so BM25 needs neither.
"""

import re
import zlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from search_r1.search.encoders.families import Vectors, family_of, model_name
from search_r1.search.errors import SetupError, install_command
from search_r1.search.settings import EncoderConfig


class Encoder(Protocol):
    """Anything that embeds queries and passages into one space, compared by inner product."""

    name: str
    pooling: str
    normalizes: bool
    """Whether vectors have unit length."""
    query_prefix: str
    passage_prefix: str

    def encode_queries(self, queries: Sequence[str]) -> Vectors:
        """(num_queries, dim) float32, contiguous, in the order of `queries`."""
        ...

    def encode_passages(self, passages: Sequence[str]) -> Vectors:
        """(num_passages, dim) float32, contiguous, in the order of `passages`."""
        ...

    def info(self) -> dict[str, Any]:
        """JSON-ready facts that decide a vector: name, pooling, prefixes, dtype, weights ..."""
        ...


class HashEncoder:
    """Counts words in hashed dimensions: an encoder without a model, for trials and tests."""

    name = "hash"
    pooling = "sum"
    normalizes = True
    query_prefix = ""
    passage_prefix = ""

    def __init__(self, dim: int = 64) -> None:
        self._dim = dim

    def encode_queries(self, queries: Sequence[str]) -> Vectors:
        """(num_queries, dim) float32, L2-normalised."""
        if not queries:
            return np.zeros((0, self._dim), dtype=np.float32)
        return np.stack([self._encode(query) for query in queries])

    encode_passages = encode_queries

    def info(self) -> dict[str, Any]:
        """Name and dimensions."""
        return {"name": self.name, "dim": self._dim}

    def _encode(self, text: str) -> Vectors:
        vector = np.zeros(self._dim, dtype=np.float32)
        for word in re.findall(r"\w+", text.lower()):
            vector[zlib.crc32(word.encode()) % self._dim] += 1
        norm = float(np.linalg.norm(vector))
        return vector / np.float32(norm) if norm else vector


class PairEncoder:
    """Two encoders of one space: one for queries, another for passages, as dpr has."""

    def __init__(self, queries: Encoder, passages: Encoder) -> None:
        """Raises SetupError when their vectors cannot be compared."""
        self._queries, self._passages = queries, passages
        self.name = passages.name
        self.pooling, self.normalizes = passages.pooling, passages.normalizes
        self.query_prefix, self.passage_prefix = queries.query_prefix, passages.passage_prefix
        dims = [len(e.encode_passages(["a"])[0]) for e in (queries, passages)]
        if dims[0] != dims[1] or queries.normalizes != passages.normalizes:
            raise SetupError(
                f"--query_model {queries.name} gives {_kind(queries, dims[0])}, but "
                f"--retriever_model {passages.name} {_kind(passages, dims[1])}; expected two "
                "encoders of one training"
            )

    def encode_queries(self, queries: Sequence[str]) -> Vectors:
        """(num_queries, dim) float32 of the encoder of queries."""
        return self._queries.encode_queries(queries)

    def encode_passages(self, passages: Sequence[str]) -> Vectors:
        """(num_passages, dim) float32 of the encoder of passages."""
        return self._passages.encode_passages(passages)

    def info(self) -> dict[str, Any]:
        """What decides a vector, of both encoders."""
        return {"queries": self._queries.info(), "passages": self._passages.info()}


def open_encoder(config: EncoderConfig, max_length: int | None = None) -> Encoder:
    """The encoder of the settings; `max_length`: tokens of a passage. Raises SetupError."""
    passages = _open_one(config, config.retriever_model, max_length)
    if config.query_model is None:
        return passages
    return PairEncoder(_open_one(config, config.query_model, max_length), passages)


def _open_one(config: EncoderConfig, path: str | None, max_length: int | None) -> Encoder:
    """The encoder of one model, once it has given a vector."""
    assert path is not None, "the caller names a model"
    encoder = _load(config, path, max_length)
    # as a passage, which dpr's encoder of passages takes alone
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
    family = family_of(model_name(path), config.encoder_family)
    try:
        from search_r1.search.encoders.loading import explain_load_errors  # noqa: PLC0415
        from search_r1.search.encoders.sentence import SentenceEncoder  # noqa: PLC0415
    except ImportError as error:
        raise SetupError(
            f"dense retrieval needs torch and sentence-transformers ({error}); "
            f"install them: {install_command('dense')}"
        ) from error
    is_passages = path == config.retriever_model
    flag = "retriever_model (of index_builder --model_path)" if is_passages else "query_model"
    with explain_load_errors(flag, path):
        return SentenceEncoder(path, family, config, max_length)


def _kind(encoder: Encoder, dim: int) -> str:
    return f"{dim} dimensions, {'' if encoder.normalizes else 'not '}normalised"
