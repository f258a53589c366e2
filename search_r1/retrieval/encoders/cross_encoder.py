"""A cross-encoder: a transformer that reads query and document together and scores the pair."""

from collections.abc import Sequence
from typing import Any

import sentence_transformers
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from search_r1.retrieval.encoders import loading
from search_r1.retrieval.encoders.cuts import Cuts, count_longer
from search_r1.retrieval.encoders.families import model_name
from search_r1.retrieval.errors import SetupError
from search_r1.retrieval.settings import RerankConfig


class CrossEncoder:
    """A sequence classifier of pairs with one output, or with two (no, yes)."""

    def __init__(self, path: str, config: RerankConfig) -> None:
        """Load the model; raises SetupError if it is not a classifier with one or two outputs."""
        device = loading.pick_device("reranker_device", config.reranker_device)
        dtype = loading.torch_dtype("reranker_dtype", config.reranker_dtype)
        loading.check_weights(AutoModelForSequenceClassification, path, trust_remote_code=False)
        self._model: Any = sentence_transformers.CrossEncoder(
            path, device=device, model_kwargs={"dtype": dtype}
        )
        num_labels = self._model.config.num_labels
        if num_labels not in (1, 2):
            raise SetupError(
                f"--reranker_model {path} has {num_labels} outputs; expected a cross-encoder with "
                "one, such as BAAI/bge-reranker-base, or with two (no, yes)"
            )
        limit = loading.longest_input(
            AutoTokenizer.from_pretrained(path, trust_remote_code=False), self._model.config
        )
        self._model.max_seq_length = min(config.reranker_max_length, limit)
        self._cuts = Cuts("pairs", self._model.max_seq_length, "--reranker_max_length")
        self.cuts = (self._cuts,)
        self._batch_size = config.reranker_batch_size
        self._facts = {
            "name": model_name(path),
            "dtype": config.reranker_dtype,
            "max_length": self._model.max_seq_length,
            "weights": loading.weights_digest(self._model.model),
        }

    @classmethod
    def open(cls, config: RerankConfig) -> "CrossEncoder":
        """Load the configured model; raises SetupError with the fix."""
        path = config.reranker_model
        assert path is not None, "the caller has checked that a model is configured"
        with loading.explain_load_errors("reranker_model", path):
            return cls(path, config)

    def scores(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """Return the logit of each pair, in order; for two outputs, the log-odds of yes."""
        num_cut = count_longer(self._model.tokenizer, pairs, self._cuts.limit)
        self._cuts.add(len(pairs), num_cut)
        logits = self._model.predict(
            list(pairs),
            batch_size=self._batch_size,
            activation_fn=torch.nn.Identity(),
            convert_to_tensor=True,
            show_progress_bar=False,
        ).float()
        scores: list[float] = (logits if logits.ndim == 1 else logits[:, 1] - logits[:, 0]).tolist()
        return scores

    def info(self) -> dict[str, Any]:
        return self._facts
