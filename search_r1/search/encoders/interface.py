"""The protocol of encoders: what every one offers between texts and vectors."""

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
