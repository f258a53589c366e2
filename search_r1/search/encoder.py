"""Text to vectors: the `Encoder` seam and its sentence-transformers implementation.

torch and sentence-transformers are loaded only when an encoder is opened, so BM25 needs neither.
"""

import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from search_r1.search.errors import SetupError
from search_r1.search.retrievers.settings import EncoderConfig

Vectors = npt.NDArray[np.float32]


class Encoder(Protocol):
    """Anything that embeds queries and passages into one space of unit vectors."""

    name: str
    pooling: str
    dtype: str

    def encode_queries(self, queries: Sequence[str]) -> Vectors:
        """(num_queries, dim) float32, L2-normalised."""
        ...

    def encode_passages(self, passages: Sequence[str]) -> Vectors:
        """(num_passages, dim) float32, L2-normalised."""
        ...


class SentenceEncoder:
    """Any sentence-transformers or e5-style folder or hub name."""

    def __init__(
        self,
        model_path: str,
        *,
        batch_size: int = 64,
        max_length: int | None = None,
        use_fp16: bool = False,
    ) -> None:
        """Load the model on a GPU if there is one; `max_length` in tokens, the model's if None."""
        self._model = _load(model_path)
        self._batch_size = batch_size
        if max_length is not None:
            self._model.max_seq_length = max_length
        if use_fp16:
            self._model.half()
        self.name = Path(model_path).name
        self.pooling = _pooling(self._model)
        self.dtype = "float16" if use_fp16 else "float32"
        is_e5 = has_e5_prefixes(self.name)
        self._query_prefix = "query: " if is_e5 else ""
        self._passage_prefix = "passage: " if is_e5 else ""

    def encode_queries(self, queries: Sequence[str]) -> Vectors:
        """(num_queries, dim) float32, L2-normalised."""
        return self._encode([self._query_prefix + query for query in queries])

    def encode_passages(self, passages: Sequence[str]) -> Vectors:
        """(num_passages, dim) float32, L2-normalised."""
        return self._encode([self._passage_prefix + passage for passage in passages])

    def _encode(self, texts: list[str]) -> Vectors:
        vectors = self._model.encode(
            texts,
            batch_size=self._batch_size,
            normalize_embeddings=True,
            convert_to_numpy=True,
            show_progress_bar=False,
        )
        return np.ascontiguousarray(vectors, dtype=np.float32)


class HashEncoder:
    """Counts words in hashed dimensions: an encoder without a model, for trials and tests."""

    name = "hash"
    pooling = "sum"
    dtype = "float32"

    def __init__(self, dim: int = 64) -> None:
        self._dim = dim

    def encode_queries(self, queries: Sequence[str]) -> Vectors:
        """(num_queries, dim) float32, L2-normalised."""
        return np.stack([self._encode(query) for query in queries])

    def encode_passages(self, passages: Sequence[str]) -> Vectors:
        """(num_passages, dim) float32, L2-normalised."""
        return self.encode_queries(passages)

    def _encode(self, text: str) -> Vectors:
        vector = np.zeros(self._dim, dtype=np.float32)
        for word in re.findall(r"\w+", text.lower()):
            vector[zlib.crc32(word.encode()) % self._dim] += 1
        norm = float(np.linalg.norm(vector))
        return vector / np.float32(norm) if norm else vector


def open_encoder(config: EncoderConfig, max_length: int | None = None) -> Encoder:
    """The encoder that the settings name; raises SetupError with the fix.

    `max_length`: tokens of a passage that are encoded; the model's own limit if None.
    """
    name = config.retriever_model
    assert name is not None, "the caller names a model"
    if name.partition(":")[0] == HashEncoder.name:
        return HashEncoder(int(name.partition(":")[2] or 64))
    return SentenceEncoder(
        name,
        batch_size=config.encoder_batch_size,
        max_length=max_length,
        use_fp16=config.encoder_dtype == "float16",
    )


def has_e5_prefixes(name: str) -> bool:
    """Whether `name` has e5 as a word, as in `e5-base-v2` and `multilingual-e5-large`."""
    return re.search(r"(?<![a-z0-9])e5(?![a-z0-9])", name.lower()) is not None


def check_pooling(encoder: Encoder, wanted: str | None) -> None:
    """Raise SetupError when `wanted` (mean, cls ...) is not what the model folder declares."""
    if wanted is not None and encoder.pooling and wanted != encoder.pooling:
        raise SetupError(
            f"--pooling_method {wanted}, but {encoder.name} declares {encoder.pooling!r}; "
            "leave the option out, or change 1_Pooling/config.json in the model folder"
        )


def _load(model_path: str) -> Any:
    """The sentence-transformers model; raises SetupError with the fix."""
    if model_path.startswith((".", "/", "~")) and not Path(model_path).is_dir():
        raise SetupError(
            f"encoder folder {model_path} does not exist; expected a sentence-transformers "
            "folder or a hub name such as intfloat/e5-base-v2: set --retriever_model"
        )
    try:
        from sentence_transformers import SentenceTransformer  # noqa: PLC0415
    except ImportError as error:
        raise SetupError(
            f"dense retrieval needs sentence-transformers ({error}); "
            "install it: pip install sentence-transformers"
        ) from error
    try:
        return SentenceTransformer(model_path)
    except (OSError, ValueError) as error:
        raise SetupError(
            f"encoder {model_path!r} cannot be loaded ({error}); expected a sentence-transformers "
            "folder or a hub name such as intfloat/e5-base-v2: set --retriever_model"
        ) from error


def _pooling(model: Any) -> str:
    """What the model's pooling module does, for example `mean` or `cls`; empty if unknown."""
    for module in model:
        if hasattr(module, "get_pooling_mode_str"):  # sentence-transformers 5
            return str(module.get_pooling_mode_str())
        if hasattr(module, "pooling_mode"):  # from 6 on
            return str(module.pooling_mode)
    return ""
