"""The encoder of most models: a transformer, a pooling of its hidden states, a normalisation.

It does what sentence-transformers does for such folders, sooner to start and with less padding,
and also serves plain checkpoints and the poolings that sentence-transformers does not have.
"""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModel
from transformers.models.dpr.modeling_dpr import DPRContextEncoder, DPRQuestionEncoder

from search_r1.search.backends.settings import EncoderConfig
from search_r1.search.encoders.batches import by_length, padded
from search_r1.search.encoders.declaration import POOLINGS, Declaration
from search_r1.search.encoders.interface import Vectors, facts
from search_r1.search.encoders.loading import (
    load_model,
    load_tokenizer,
    longest_input,
    pick_device,
    torch_dtype,
    weights_digest,
)
from search_r1.search.errors import SetupError

logger = logging.getLogger(__name__)

CPU_BATCH, GPU_BATCH = 16, 64
"""A CPU gains nothing from larger batches, but computes their padding."""
DPR = {"DPRContextEncoder": DPRContextEncoder, "DPRQuestionEncoder": DPRQuestionEncoder}
"""Classes that AutoModel does not tell apart."""


class TransformerEncoder:
    """Embeds texts by the pooled hidden states of a transformer."""

    def __init__(
        self, name: str, declared: Declaration, config: EncoderConfig, max_length: int | None
    ) -> None:
        """Load the model; `max_length`: tokens of a passage, the model's limit if None.

        Raises SetupError for an unknown pooling, dtype or device.
        """
        path = config.retriever_model
        assert path is not None, "the caller names a model"
        self.name = name
        self.pooling = _pooling(name, declared, config.pooling_method)
        self.normalizes = declared.normalizes
        self.dtype = config.encoder_dtype
        self.query_prefix = declared.query_prefix
        self.passage_prefix = declared.passage_prefix
        dtype = torch_dtype("encoder_dtype", self.dtype)
        self._device = pick_device("encoder_device", config.encoder_device)
        model = _load(path, declared.subfolder, self.pooling, dtype, config.trust_remote_code)
        model.to(self._device)
        self._dim = _dim(model.config)
        self._weights = weights_digest(model)
        self._tokenizer = load_tokenizer(path, declared.subfolder, config.trust_remote_code)
        limit = longest_input(self._tokenizer, model.config)
        self._query_length = min(config.query_max_length, limit)
        self._passage_length = min(max_length or declared.max_length or limit, limit)
        self._is_for_passages = isinstance(model, DPRContextEncoder)
        self._batch_size = config.encoder_batch_size or (
            CPU_BATCH if self._device.type == "cpu" else GPU_BATCH
        )
        self._model: Any = model
        if config.compile_encoder:
            self._model = torch.compile(model, dynamic=True)
            self._compile()

    def encode_queries(self, queries: Sequence[str]) -> Vectors:
        """(num_queries, dim) float32; raises SetupError for an encoder of passages alone."""
        if self._is_for_passages:
            raise SetupError(
                f"{self.name} encodes passages only (dpr has two encoders); expected the "
                "encoder of questions too: set --query_model"
            )
        return self._encode(queries, self.query_prefix, self._query_length)

    def encode_passages(self, passages: Sequence[str]) -> Vectors:
        """(num_passages, dim) float32."""
        return self._encode(passages, self.passage_prefix, self._passage_length)

    def info(self) -> dict[str, Any]:
        """What decides a vector."""
        return facts(self, self._query_length, self._weights)

    def _compile(self) -> None:
        """Compile now what the first searches would wait for: one text, and several."""
        for texts in (["a"], ["a", "a b c"]):
            self._encode(texts, self.query_prefix, self._query_length)

    @torch.inference_mode()
    def _encode(self, texts: Sequence[str], prefix: str, max_length: int) -> Vectors:
        """Embed in batches of about equal length; the answer is in the order of `texts`."""
        vectors = np.empty((len(texts), self._dim), dtype=np.float32)
        if not texts:
            return vectors
        ids = self._tokenizer(
            [prefix + text for text in texts],
            truncation=True,
            max_length=max_length,
            return_attention_mask=False,
            return_token_type_ids=False,
        )["input_ids"]
        for rows in by_length([len(row) for row in ids], self._batch_size):
            vectors[rows] = self._embed([ids[row] for row in rows])
        return vectors

    def _embed(self, ids: list[list[int]]) -> Vectors:
        """(batch, dim) vectors of one batch."""
        tokens, mask = padded(ids, self._tokenizer.pad_token_id or 0, self._device)
        states = self._model(input_ids=tokens, attention_mask=mask)
        vectors = pooled(states, mask, self.pooling)
        if self.normalizes:
            vectors = torch.nn.functional.normalize(vectors, dim=1)
        return vectors.cpu().numpy()


def _dim(config: Any) -> int:
    """Components of a vector; dpr may project its hidden states."""
    return getattr(config, "projection_dim", 0) or config.hidden_size


def pooled(states: Any, mask: torch.Tensor, pooling: str) -> torch.Tensor:
    """(batch, dim) float32 of a model's output: the mean of real tokens, the first, or its pooler.

    A dpr encoder gives its (projected) first token as `pooler_output` and nothing else.
    """
    hidden = getattr(states, "last_hidden_state", None)
    if pooling == "pooler" or hidden is None:
        return states.pooler_output.float()  # type: ignore[no-any-return]
    if pooling == "cls":
        return hidden[:, 0].float()  # type: ignore[no-any-return]
    weights = mask[..., None].float()
    return (hidden.float() * weights).sum(1) / weights.sum(1)  # type: ignore[no-any-return]


def _pooling(name: str, declared: Declaration, wanted: str | None) -> str:
    """The pooling to use; raises SetupError if nobody says, or flag and folder disagree."""
    if wanted is not None and wanted not in POOLINGS:
        raise SetupError(f"--pooling_method {wanted}; expected {', '.join(POOLINGS)}")
    if wanted is not None and declared.is_from_folder and wanted != declared.pooling:
        raise SetupError(
            f"--pooling_method {wanted}, but {name} declares {declared.pooling!r}; "
            "leave the option out, or change 1_Pooling/config.json in the model folder"
        )
    pooling = wanted or declared.pooling
    if pooling is None:
        raise SetupError(
            f"encoder {name} has no modules.json and is of no known family, so its pooling is "
            f"unknown; expected --pooling_method {' or '.join(POOLINGS)}"
        )
    return pooling


def _load(
    path: str, subfolder: str, pooling: str, dtype: torch.dtype, trust_remote_code: bool
) -> torch.nn.Module:
    """The transformer; a missing pooler is refused only where it is used."""
    options = {"subfolder": subfolder, "trust_remote_code": trust_remote_code}
    config = AutoConfig.from_pretrained(path, **options)
    kind = DPR.get((config.architectures or [""])[0], AutoModel)
    spare = "" if pooling == "pooler" else "pooler."
    return load_model(kind, path, spare=spare, dtype=dtype, **options)
