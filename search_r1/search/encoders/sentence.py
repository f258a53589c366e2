"""Encoders by sentence-transformers: a transformer, a pooling of its states, a normalisation.

A folder with a `modules.json` is used as it declares; a plain checkpoint as its family is, or as
`--pooling_method` says.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoTokenizer
from transformers.models.dpr.modeling_dpr import DPRContextEncoder
from transformers.utils.hub import cached_file

from search_r1.search.encoders.families import Family, Vectors, model_name
from search_r1.search.encoders.loading import (
    check_weights,
    longest_input,
    pick_device,
    torch_dtype,
    weights_digest,
)
from search_r1.search.errors import SetupError
from search_r1.search.settings import EncoderConfig

POOLINGS = ("mean", "cls", "pooler")
SIMPLE = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])
QUERY_PROMPTS, PASSAGE_PROMPTS = ("query",), ("passage", "document", "corpus")
"""Names under which a folder keeps its prefixes."""
CPU_BATCH, GPU_BATCH = 16, 64
"""A CPU gains nothing from larger batches, but computes their padding."""
QUERY_TOKENS = 512
"""Of a batch on a CPU, padding included: a server's memory stays what its largest batch took, which
would grow with the longest queries that happen to meet."""
DPR = ("DPRContextEncoder", "DPRQuestionEncoder")
"""Architectures that have a (projected) first token as their pooler's output and nothing else."""
POOLER: dict[str, Any] = {
    "modality_config": {"text": {"method": "forward", "method_output_name": "pooler_output"}},
    "module_output_name": "sentence_embedding",
}
"""Options of a transformer whose pooler gives the vector."""


class SentenceEncoder:
    """The encoder of a model folder or hub name."""

    def __init__(self, path: str, family: Family, config: EncoderConfig, max_length: int | None):
        """Load the model; `max_length`: tokens of a passage. Raises SetupError."""
        self.name, self.dtype = model_name(path), config.encoder_dtype
        self.query_prefix, self.passage_prefix = family.query_prefix, family.passage_prefix
        self._dtype = torch_dtype("encoder_dtype", self.dtype)
        self._device = pick_device("encoder_device", config.encoder_device)
        self._options: dict[str, Any] = {
            "trust_remote_code": config.trust_remote_code,
            "subfolder": "",
        }
        wanted = config.pooling_method
        if wanted is not None and wanted not in POOLINGS:
            raise SetupError(f"--pooling_method {wanted}; expected {', '.join(POOLINGS)}")
        modules = cached_file(path, "modules.json", _raise_exceptions_for_missing_entries=False)
        declared: int | None = None
        if modules:
            self._options["subfolder"] = json.loads(Path(modules).read_text())[0]["path"]
            declared = self._open_declared(path, wanted)
        else:
            self._open_plain(path, wanted or family.pooling, family.normalizes)
        if self.pooling == "modules":
            self._weights = weights_digest(self._model)
            limit = declared or config.query_max_length
        else:
            transformer = self._model[0].auto_model
            spare = "" if self.pooling == "pooler" else "pooler."
            check_weights(type(transformer), path, spare=spare, **self._options)
            self._weights = weights_digest(transformer)
            # the loaded tokenizer's limit is already cut to what the folder declares
            tokenizer = AutoTokenizer.from_pretrained(path, **self._options)
            limit = longest_input(tokenizer, transformer.config)
        self._query_length = min(config.query_max_length, limit)
        self._passage_length = min(max_length or declared or limit, limit)
        on_cpu = self._device == "cpu"
        self._batch_size = config.encoder_batch_size or (CPU_BATCH if on_cpu else GPU_BATCH)
        if config.compile_encoder:
            self._model.compile(dynamic=True)
            for texts in (["a"], ["a", "a b c"]):  # else the first searches would wait for it
                self._encode(texts, self.query_prefix, self._query_length)

    def encode_queries(self, queries: Sequence[str]) -> Vectors:
        """(num_queries, dim) float32; raises SetupError for an encoder of passages alone."""
        if isinstance(getattr(self._model[0], "auto_model", None), DPRContextEncoder):
            raise SetupError(
                f"{self.name} encodes passages only (dpr has two encoders); expected the "
                "encoder of questions too: set --query_model"
            )
        most = QUERY_TOKENS if self._device == "cpu" else None
        return self._encode(queries, self.query_prefix, self._query_length, most)

    def encode_passages(self, passages: Sequence[str]) -> Vectors:
        """(num_passages, dim) float32."""
        return self._encode(passages, self.passage_prefix, self._passage_length)

    def info(self) -> dict[str, Any]:
        """What decides a vector: a server's identity and its caches depend on each entry."""
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
        self, texts: Sequence[str], prefix: str, max_length: int, max_tokens: int | None = None
    ) -> Vectors:
        """Embed in batches of about equal length; the answer is in the order of `texts`.

        The library's own `encode` tokenizes each batch apart and sorts by characters: measured, 7 %
        fewer passages a second, and a query took a fifth longer.
        """
        if not texts:
            return self._encode(["a"], prefix, max_length)[:0]
        prefixed = [prefix + text for text in texts]
        if self.pooling == "modules":
            self._model.max_seq_length = max_length
            vectors = self._model.encode(
                prefixed, prompt="", batch_size=self._batch_size, show_progress_bar=False
            )
            return np.ascontiguousarray(vectors, dtype=np.float32)
        tokenizer = self._model[0].tokenizer
        rows = tokenizer(prefixed, truncation=True, max_length=max_length)["input_ids"]
        order = sorted(range(len(rows)), key=lambda row: -len(rows[row]))
        found = []
        for batch in batches([len(rows[row]) for row in order], self._batch_size, max_tokens):
            ids = [torch.tensor(rows[row]) for row in order[batch]]
            masks = [torch.ones_like(row) for row in ids]
            tokens = pad_sequence(ids, True, tokenizer.pad_token_id or 0).to(self._device)
            mask = pad_sequence(masks, True).to(self._device)
            features = {"input_ids": tokens, "attention_mask": mask}
            found.append(self._model(features)["sentence_embedding"].cpu())
        vectors = np.empty((len(rows), found[0].shape[1]), dtype=np.float32)
        vectors[order] = torch.cat(found).numpy()
        return vectors

    def _open_declared(self, path: str, wanted: str | None) -> int | None:
        """Load a sentence-transformers folder; returns the length in tokens that it declares."""
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
        if wanted is not None and wanted != self.pooling:
            own = f"declares {self.pooling!r}" if is_simple else "has modules of its own"
            raise SetupError(
                f"--pooling_method {wanted}, but {self.name} {own}; leave the option out, or "
                "change modules.json and 1_Pooling/config.json in the model folder"
            )
        prompts = [
            next((model.prompts[name] for name in names if model.prompts.get(name)), "")
            for names in (QUERY_PROMPTS, PASSAGE_PROMPTS)
        ]
        if any(prompts):
            self.query_prefix, self.passage_prefix = prompts
        self._model = self._joined(*model) if is_simple else model.to(self._dtype)
        length: int | None = model.max_seq_length
        return length

    def _open_plain(self, path: str, pooling: str | None, normalizes: bool) -> None:
        """Load a checkpoint without modules."""
        if pooling is None:
            raise SetupError(
                f"encoder {self.name} has no modules.json and is of no known family, so its "
                f"pooling is unknown; expected --pooling_method {' or '.join(POOLINGS)}"
            )
        self.pooling, self.normalizes = pooling, normalizes
        options: dict[str, Any] = {"trust_remote_code": self._options["trust_remote_code"]}
        kind = (AutoConfig.from_pretrained(path, **options).architectures or [""])[0]
        ends_pooled = pooling == "pooler" or kind in DPR
        kind_of_transformer = PassageDpr if kind == "DPRContextEncoder" else Transformer
        transformer: Any = kind_of_transformer(
            path,
            model_kwargs={"dtype": self._dtype, **options},
            config_kwargs=dict(options),
            processor_kwargs=dict(options),
            **(POOLER if ends_pooled else {}),
        )
        parts = [transformer]
        if not ends_pooled:
            parts.append(Pooling(transformer.get_embedding_dimension(), pooling))
        self._model = self._joined(*parts, *([Normalize()] if normalizes else []))

    def _joined(self, transformer: Any, *others: Any) -> Any:
        """One model of these modules, in float32 from the transformer's output on."""
        parts = [transformer, Widen(), *others]
        return SentenceTransformer(modules=parts, device=self._device).eval()


def batches(
    lengths: Sequence[int], max_rows: int, max_tokens: int | None = None
) -> Iterator[slice]:
    """Slices of rows, longest first, of at most so many rows, and tokens with their padding."""
    start = 0
    while start < len(lengths):
        fitting = max_tokens // max(lengths[start], 1) if max_tokens else max_rows
        end = start + max(1, min(max_rows, fitting))
        yield slice(start, end)
        start = end


class PassageDpr(Transformer):
    """The encoder of passages of dpr: AutoModel takes every dpr model for the one of questions."""

    def _load_model(self, model_name_or_path: str, *args: Any, **model_kwargs: Any) -> Any:
        return DPRContextEncoder.from_pretrained(model_name_or_path, **model_kwargs)


class Widen(torch.nn.Module):
    """Makes a transformer's output float32: half precision would round means and lengths."""

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        """Features with float32 states, or vectors where the transformer pools by itself."""
        outputs = {"token_embeddings", "sentence_embedding"} & features.keys()
        return features | {name: features[name].float() for name in outputs}
