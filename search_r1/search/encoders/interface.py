"""What every encoder offers: the seam between texts and vectors."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Vectors = npt.NDArray[np.float32]


class Encoder(Protocol):
    """Anything that embeds queries and passages into one space, compared by inner product."""

    name: str
    pooling: str
    dtype: str
    """Of the computation; vectors are float32."""
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


def facts(encoder: Encoder, query_max_length: int, weights: str) -> dict[str, Any]:
    """What decides a vector of a model: its habits, its limit in tokens, a hash of its weights."""
    return {
        "name": encoder.name,
        "pooling": encoder.pooling,
        "normalizes": encoder.normalizes,
        "dtype": encoder.dtype,
        "query_prefix": encoder.query_prefix,
        "passage_prefix": encoder.passage_prefix,
        "query_max_length": query_max_length,
        "weights": weights,
    }
