"""Encoders by sentence-transformers: a transformer, pooling of its states, and normalisation.

A model folder with a `modules.json` is used as declared there; the pooling of a plain checkpoint
follows from `--pooling_method` or its family.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import (
    Normalize,
    Pooling,
    StaticEmbedding,
    Transformer,
)
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.dpr.modeling_dpr import DPRContextEncoder
from transformers.utils.hub import cached_file

from search_r1.retrieval.encoders import loading
from search_r1.retrieval.encoders.cuts import Cuts, count_cut, count_longer
from search_r1.retrieval.encoders.families import Family, Vectors, model_name
from search_r1.retrieval.errors import SetupError
from search_r1.retrieval.settings import EncoderConfig

POOLINGS = ("mean", "cls", "pooler")
SIMPLE = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])
QUERY_PROMPTS, PASSAGE_PROMPTS = ("query",), ("passage", "document", "corpus")
"""Names of the prefixes in `config_sentence_transformers.json`, in order of preference."""
CPU_BATCH, GPU_BATCH = 16, 64
"""Default batch sizes. On a CPU larger batches only add padding."""
CPU_QUERY_TOKENS = 512
"""Maximum number of tokens, padding included, in a batch of queries on a CPU. A server keeps the
memory of its largest batch, which several long queries in one batch would make larger."""
DPR = ("DPRContextEncoder", "DPRQuestionEncoder")
"""Architectures whose only output is the pooler's: the first token, projected if configured."""
POOLER_OPTIONS: dict[str, Any] = {
    "modality_config": {"text": {"method": "forward", "method_output_name": "pooler_output"}},
    "module_output_name": "sentence_embedding",
}
"""Options of the Transformer module if the pooler output is the vector."""


class SentenceEncoder:
    """An encoder from a model folder or hub name."""

    def __init__(self, path: str, family: Family, config: EncoderConfig, max_length: int | None):
        """Load the model; `max_length`: tokens of a passage. Raises SetupError."""
        self.name, self.dtype = model_name(path), config.encoder_dtype
        self.query_prefix, self.passage_prefix = family.query_prefix, family.passage_prefix
        self._dtype = loading.torch_dtype("encoder_dtype", self.dtype)
        self._device = loading.pick_device("encoder_device", config.encoder_device)
        self._options: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
        pooling = config.pooling_method
        if pooling is not None and pooling not in POOLINGS:
            raise SetupError(f"--pooling_method {pooling}; expected {', '.join(POOLINGS)}")
        modules = cached_file(path, "modules.json", _raise_exceptions_for_missing_entries=False)
        declared_length: int | None = None
        if modules:
            self._options["subfolder"] = json.loads(Path(modules).read_text())[0]["path"]
            declared_length = self._load_modules(path, pooling)
        else:
            self._load_checkpoint(path, pooling or family.pooling, family.normalizes)
        self.is_static = isinstance(self._model[0], StaticEmbedding)
        if self.pooling == "modules":
            self._weights = loading.weights_digest(self._model)
            limit = declared_length or config.query_max_length
        else:
            transformer = self._model[0].auto_model
            unused = "" if self.pooling == "pooler" else "pooler."
            loading.check_weights(type(transformer), path, optional_prefix=unused, **self._options)
            self._weights = loading.weights_digest(transformer)
            # A new tokenizer: the limit of the loaded one is already reduced to the declared one.
            tokenizer = AutoTokenizer.from_pretrained(path, **self._options)
            limit = loading.longest_input(tokenizer, transformer.config)
        self._query_length = min(config.query_max_length, limit)
        self._passage_length = min(max_length or declared_length or limit, limit)
        self._query_cuts = Cuts("queries", self._query_length, "--query_max_length")
        self._passage_cuts = Cuts("passages", self._passage_length)
        self.cuts = (self._query_cuts, self._passage_cuts)
        on_cpu = self._device == "cpu"
        self._batch_size = config.encoder_batch_size or (CPU_BATCH if on_cpu else GPU_BATCH)

    def encode_queries(self, queries: Sequence[str]) -> Vectors:
        """Return (num_queries, dim) float32; raises SetupError for a passage encoder."""
        if isinstance(getattr(self._model[0], "auto_model", None), DPRContextEncoder):
            raise SetupError(
                f"{self.name} encodes passages only (dpr has two encoders); expected the "
                "question encoder too: set --query_model"
            )
        max_tokens = CPU_QUERY_TOKENS if self._device == "cpu" else None
        return self._encode(queries, self.query_prefix, self._query_cuts, max_tokens)

    def encode_passages(self, passages: Sequence[str]) -> Vectors:
        return self._encode(passages, self.passage_prefix, self._passage_cuts)

    def info(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "pooling": self.pooling,
            "normalizes": self.normalizes,
            "dtype": self.dtype,
            "query_prefix": self.query_prefix,
            "passage_prefix": self.passage_prefix,
            "query_max_length": self._query_length,
            "weights": self._weights,
        }

    @torch.inference_mode()
    def _encode(
        self, texts: Sequence[str], prefix: str, cuts: Cuts, max_tokens: int | None = None
    ) -> Vectors:
        """Embed in batches of texts of similar length; returns vectors in the order of `texts`.

        Longer texts than `cuts.limit` tokens are cut, and counted in `cuts`.

        The library's `encode`, which sorts by characters and tokenizes each batch separately, was
        measured to encode 7 % fewer passages a second and to take 20 % longer for a query.
        """
        if not texts:
            return self._encode(["a"], prefix, cuts)[:0]
        prefixed = [prefix + text for text in texts]
        if self.is_static:  # has no limit, and needs no small batches
            features = self._model(self._model.preprocess(prefixed))
            return np.ascontiguousarray(features["sentence_embedding"].float().cpu())
        if self.pooling == "modules":
            self._model.max_seq_length = cuts.limit
            if isinstance(tokenizer := self._model.tokenizer, PreTrainedTokenizerBase):
                rows = [(text,) for text in prefixed]
                cuts.add(len(rows), count_longer(tokenizer, rows, cuts.limit))
            vectors = self._model.encode(
                prefixed, prompt="", batch_size=self._batch_size, show_progress_bar=False
            )
            return np.ascontiguousarray(vectors, dtype=np.float32)
        tokenizer = self._model[0].tokenizer
        tokenized = tokenizer(prefixed, truncation=True, max_length=cuts.limit)
        cuts.add(len(texts), count_cut(tokenized, cuts.limit))
        rows = tokenized["input_ids"]
        order = sorted(range(len(rows)), key=lambda row: -len(rows[row]))
        encoded = []
        for batch in batches([len(rows[row]) for row in order], self._batch_size, max_tokens):
            ids = [torch.tensor(rows[row]) for row in order[batch]]
            masks = [torch.ones_like(row) for row in ids]
            tokens = pad_sequence(ids, True, tokenizer.pad_token_id or 0).to(self._device)
            mask = pad_sequence(masks, True).to(self._device)
            features = {"input_ids": tokens, "attention_mask": mask}
            encoded.append(self._model(features)["sentence_embedding"].cpu())
        vectors = np.empty((len(rows), encoded[0].shape[1]), dtype=np.float32)
        vectors[order] = torch.cat(encoded).numpy()
        return vectors

    def _load_modules(self, path: str, pooling: str | None) -> int | None:
        """Load a sentence-transformers folder; returns its declared input length in tokens."""
        model: Any = SentenceTransformer(
            path,
            device=self._device,
            trust_remote_code=self._options["trust_remote_code"],
            model_kwargs={"dtype": self._dtype},
        )
        kinds = [type(module).__name__ for module in model]
        self.normalizes = kinds[-1] == "Normalize"
        is_simple = (
            kinds in SIMPLE and model[1].pooling_mode in POOLINGS and not model[0].do_lower_case
        )
        self.pooling = model[1].pooling_mode if is_simple else "modules"
        if pooling is not None and pooling != self.pooling:
            declares = f"declares {self.pooling!r}" if is_simple else "has modules of its own"
            raise SetupError(
                f"--pooling_method {pooling}, but {self.name} {declares}; leave the option out, or "
                "change modules.json and 1_Pooling/config.json in the model folder"
            )
        prompts = [
            next((model.prompts[name] for name in names if model.prompts.get(name)), "")
            for names in (QUERY_PROMPTS, PASSAGE_PROMPTS)
        ]
        self.has_prompts = any(prompts)
        if self.has_prompts:
            self.query_prefix, self.passage_prefix = prompts
        self._model = self._assemble(*model) if is_simple else model.to(self._dtype)
        length: int | None = model.max_seq_length
        return length

    def _load_checkpoint(self, path: str, pooling: str | None, normalizes: bool) -> None:
        if pooling is None:
            raise SetupError(
                f"encoder {self.name} has no modules.json and belongs to no known family, so its "
                f"pooling is unknown; expected --pooling_method {' or '.join(POOLINGS)}"
            )
        self.pooling, self.normalizes = pooling, normalizes
        options = self._options
        architecture = (AutoConfig.from_pretrained(path, **options).architectures or [""])[0]
        uses_pooler = pooling == "pooler" or architecture in DPR
        transformer_class = PassageDpr if architecture == "DPRContextEncoder" else Transformer
        transformer: Any = transformer_class(
            path,
            model_kwargs={"dtype": self._dtype, **options},
            config_kwargs=dict(options),
            processor_kwargs=dict(options),
            **(POOLER_OPTIONS if uses_pooler else {}),
        )
        parts = [transformer]
        if not uses_pooler:
            parts.append(Pooling(transformer.get_embedding_dimension(), pooling))
        self._model = self._assemble(*parts, *([Normalize()] if normalizes else []))

    def _assemble(self, transformer: Any, *others: Any) -> Any:
        """Return a model of these modules that computes in float32 after the transformer."""
        parts = [transformer, ToFloat32(), *others]
        return SentenceTransformer(modules=parts, device=self._device).eval()


def batches(
    lengths: Sequence[int], max_rows: int, max_tokens: int | None = None
) -> Iterator[slice]:
    """Yield slices of rows, longest first, within both limits, but of at least one row."""
    start = 0
    while start < len(lengths):
        fitting = max_tokens // max(lengths[start], 1) if max_tokens else max_rows
        end = start + max(1, min(max_rows, fitting))
        yield slice(start, end)
        start = end


class PassageDpr(Transformer):
    """The passage encoder of dpr, since AutoModel loads every dpr model as a question encoder."""

    def _load_model(self, model_name_or_path: str, *args: Any, **model_kwargs: Any) -> Any:
        return DPRContextEncoder.from_pretrained(model_name_or_path, **model_kwargs)


class ToFloat32(torch.nn.Module):
    """Converts a transformer's output to float32; half precision would round means and norms."""

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        """Return the features with float32 token states, or vectors if the transformer pools."""
        outputs = {"token_embeddings", "sentence_embedding"} & features.keys()
        return features | {name: features[name].float() for name in outputs}
