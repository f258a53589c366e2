"""A cross-encoder: one number for a query and a document that a transformer reads together."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from search_r1.search.backends.settings import RerankConfig
from search_r1.search.encoders.batches import by_length, padded
from search_r1.search.encoders.families import model_name
from search_r1.search.encoders.loading import (
    explained,
    load_model,
    load_tokenizer,
    longest_input,
    pick_device,
    torch_dtype,
    weights_digest,
)
from search_r1.search.errors import SetupError


class CrossEncoder:
    """Any sequence classifier of pairs with one output, or with two (no, yes)."""

    def __init__(self, path: str, config: RerankConfig) -> None:
        """Load the model; raises SetupError if it is not a classifier with one or two outputs."""
        device = pick_device("reranker_device", config.reranker_device)
        dtype = torch_dtype("reranker_dtype", config.reranker_dtype)
        model: Any = load_model(AutoModelForSequenceClassification, path, dtype=dtype).to(device)
        self._model = model
        num_labels = model.config.num_labels
        if num_labels not in (1, 2):
            raise SetupError(
                f"--reranker_model {path} has {num_labels} outputs; expected a cross-encoder with "
                "one, such as BAAI/bge-reranker-base, or with two (no, yes)"
            )
        self._device = device
        self._tokenizer = load_tokenizer(path, "", trust_remote_code=False)
        limit = longest_input(self._tokenizer, self._model.config)
        self._max_length = min(config.reranker_max_length, limit)
        self._batch_size = config.reranker_batch_size
        self._facts = {
            "name": model_name(path),
            "dtype": config.reranker_dtype,
            "max_length": self._max_length,
            "weights": weights_digest(model),
        }

    @classmethod
    def open(cls, config: RerankConfig) -> "CrossEncoder":
        """The model that the settings name; raises SetupError with the fix."""
        path = config.reranker_model
        assert path is not None, "the caller names a model"
        encoder: CrossEncoder = explained("reranker_model", path, lambda: cls(path, config))
        return encoder

    @torch.inference_mode()
    def scores(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """The logit of each pair, in order; for two outputs the log-odds of yes.

        A pair that is too long loses the end of its longer text.
        """
        encoded = self._tokenizer(
            [query for query, _ in pairs],
            [document for _, document in pairs],
            truncation="longest_first",
            max_length=self._max_length,
            return_attention_mask=False,
        )
        scores = [0.0] * len(pairs)
        for rows in by_length([len(ids) for ids in encoded["input_ids"]], self._batch_size):
            batch = {name: [values[i] for i in rows] for name, values in encoded.items()}
            for row, score in zip(rows, self._score(batch), strict=True):
                scores[row] = score
        return scores

    def info(self) -> dict[str, Any]:
        """What decides a score."""
        return self._facts

    def _score(self, batch: dict[str, list[list[int]]]) -> list[float]:
        ids, mask = padded(batch["input_ids"], self._tokenizer.pad_token_id or 0, self._device)
        inputs = {"input_ids": ids, "attention_mask": mask}
        if "token_type_ids" in batch:
            inputs["token_type_ids"] = padded(batch["token_type_ids"], 0, self._device)[0]
        logits = self._model(**inputs).logits.float()
        values = logits[:, 0] if logits.shape[1] == 1 else logits[:, 1] - logits[:, 0]
        found: list[float] = values.tolist()
        return found
