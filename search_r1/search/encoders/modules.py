"""Encoders whose folder lists more modules than a transformer and its pooling.

sentence-transformers runs them: a dense layer on top, a pooling of the last token, and the like.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

from search_r1.search.backends.settings import EncoderConfig
from search_r1.search.encoders.declaration import Declaration
from search_r1.search.encoders.interface import Vectors, facts
from search_r1.search.encoders.loading import pick_device, torch_dtype, weights_digest
from search_r1.search.errors import SetupError

BATCH_SIZE = 64


class ModulesEncoder:
    """Any sentence-transformers folder, run as its modules.json says."""

    pooling = "modules"

    def __init__(
        self, name: str, declared: Declaration, config: EncoderConfig, max_length: int | None
    ) -> None:
        """Load the model; `max_length`: tokens of a passage, the model's own limit if None.

        Raises SetupError for a pooling that the folder does not ask for.
        """
        if config.pooling_method is not None:
            raise SetupError(
                f"--pooling_method {config.pooling_method}, but {name} has modules of its own; "
                "leave the option out, or change modules.json in the model folder"
            )
        self.name = name
        self.normalizes = declared.normalizes
        self.dtype = config.encoder_dtype
        self.query_prefix = declared.query_prefix
        self.passage_prefix = declared.passage_prefix
        dtype = torch_dtype("encoder_dtype", self.dtype)
        self._model: Any = SentenceTransformer(
            config.retriever_model,
            device=str(pick_device("encoder_device", config.encoder_device)),
            trust_remote_code=config.trust_remote_code,
            model_kwargs={"dtype": dtype},
        ).to(dtype)
        self._weights = weights_digest(self._model)
        limit = self._model.max_seq_length or config.query_max_length
        self._passage_length = min(max_length or limit, limit)
        self._query_length = min(config.query_max_length, limit)
        self._batch_size = config.encoder_batch_size or BATCH_SIZE
        if config.compile_encoder:
            self._model.compile(dynamic=True)

    def encode_queries(self, queries: Sequence[str]) -> Vectors:
        """(num_queries, dim) float32."""
        return self._encode(queries, self.query_prefix, self._query_length)

    def encode_passages(self, passages: Sequence[str]) -> Vectors:
        """(num_passages, dim) float32."""
        return self._encode(passages, self.passage_prefix, self._passage_length)

    def info(self) -> dict[str, Any]:
        """What decides a vector."""
        return facts(self, self._query_length, self._weights)

    def _encode(self, texts: Sequence[str], prefix: str, max_length: int) -> Vectors:
        self._model.max_seq_length = max_length
        with torch.inference_mode():
            vectors = self._model.encode(
                [prefix + text for text in texts],
                prompt="",
                batch_size=self._batch_size,
                convert_to_tensor=True,
                show_progress_bar=False,
            )
        return np.ascontiguousarray(vectors.float().cpu().numpy())
