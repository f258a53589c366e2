"""What a dense index is encoded with, wherever it is kept: encoder settings, manifest, key."""

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from search_r1.retrieval.corpus import Corpus
from search_r1.retrieval.encoder import Encoder, HashEncoder
from search_r1.retrieval.encoders.prefixes import recognised
from search_r1.retrieval.engines.dense import probe
from search_r1.retrieval.errors import IndexMismatch, SetupError
from search_r1.retrieval.index.build_folder import utc_now
from search_r1.retrieval.index.embeddings import DTYPES, Matrix, open_embeddings
from search_r1.retrieval.index_builder import BuildConfig
from search_r1.retrieval.manifest import Manifest
from search_r1.retrieval.settings import EncoderConfig


def encoder_settings(config: BuildConfig, manifest: Manifest | None = None) -> list[EncoderConfig]:
    """Return the encoder settings of each device; raises SetupError for invalid options.

    `manifest`: of the index that is extended, if any.
    """
    if config.model_path is None:
        raise SetupError(
            f"--retrieval_method {config.retrieval_method} without --model_path; expected bm25, "
            "or another name and an encoder, for example --model_path intfloat/e5-base-v2"
        )
    if config.embedding_dtype not in DTYPES:
        raise SetupError(f"--embedding_dtype {config.embedding_dtype}; expected float32 or float16")
    settings = EncoderConfig(
        config.model_path,
        encoder_family=config.encoder_family,
        pooling_method=config.pooling_method,
        encoder_batch_size=config.batch_size,
        encoder_dtype="float16" if config.use_fp16 else "float32",
        trust_remote_code=config.trust_remote_code,
    )
    settings = recognised(settings, config.retrieval_method, manifest)
    if not config.devices and config.model_path.partition(":")[0] == HashEncoder.name:
        return [settings]
    from search_r1.retrieval.engines.torch_flat import choose_devices  # noqa: PLC0415 - torch

    return [replace(settings, encoder_device=name) for name in choose_devices(config.devices)]


def manifest_of(config: BuildConfig, corpus: Corpus, encoder: Encoder, made_with: str) -> Manifest:
    """Return the manifest of an index of this corpus, encoded so."""
    probe_vector = probe(encoder)
    return Manifest(
        config.retrieval_method,
        corpus.fingerprint,
        len(corpus),
        dtype=config.embedding_dtype,
        encoder=encoder.name,
        pooling=encoder.pooling,
        dim=len(probe_vector),
        probe=probe_vector,
        factory=config.faiss_type,
        max_length=config.max_length,
        query_prefix=encoder.query_prefix,
        passage_prefix=encoder.passage_prefix,
        normalizes=encoder.normalizes,
        created=utc_now(),
        made_with=made_with,
        filter_fields=config.filter_fields,
    )


def build_key(config: BuildConfig, manifest: Manifest) -> dict[str, object]:
    """Return all that affects the embeddings: only a build with the same key may resume."""
    facts = asdict(manifest)
    names = ("corpus", "encoder", "probe", "pooling", "dtype", "max_length")
    precision = "float16" if config.use_fp16 else "float32"
    key = {name: facts[name] for name in names}
    return key | {"precision": precision, "shard_rows": config.shard_rows}


def load_embeddings(path: Path, corpus: Corpus, encoder: Encoder, dim: int) -> Matrix:
    """Open embeddings; raises IndexMismatch if the first or last row is not the encoder's."""
    matrix = open_embeddings(path, len(corpus), dim)
    rows = [0, len(corpus) - 1]
    expected = encoder.encode_passages([corpus[row].contents for row in rows])
    loaded = np.asarray(matrix[rows], dtype=np.float32)
    scale = np.linalg.norm(loaded, axis=1) * np.linalg.norm(expected, axis=1)
    similarity = float(((loaded * expected).sum(axis=1) / np.maximum(scale, 1e-12)).min())
    is_zero = not expected.any() and not loaded.any()
    if similarity < 0.99 and not is_zero:
        raise IndexMismatch(
            f"embeddings {path} differ from what {encoder.name} computes for the first and "
            f"last documents of the corpus (cosine {similarity:.3f}, expected 0.99); give the "
            "--model_path, --max_length and --corpus_path they were made with"
        )
    return matrix
