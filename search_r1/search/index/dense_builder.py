"""Builds a dense index: corpus → embeddings → FAISS, each step checked before it starts."""

import logging
from dataclasses import asdict
from pathlib import Path

import numpy as np

from search_r1.search.backends.dense import VECTORS_NAME, probe
from search_r1.search.backends.settings import EncoderConfig
from search_r1.search.corpus import Corpus
from search_r1.search.encoder import check_pooling, open_encoder
from search_r1.search.encoders.interface import Encoder
from search_r1.search.errors import IndexMismatch, SetupError
from search_r1.search.index import faiss_builder
from search_r1.search.index.build_config import BuildConfig
from search_r1.search.index.build_folder import (
    READY_NAME,
    check_disk,
    fresh_folder,
    gb,
    publish,
    work_folder,
)
from search_r1.search.index.embeddings import DTYPES, EmbeddingFile, Matrix, open_embeddings
from search_r1.search.index.encoding import EncodeJob, encode, visible_devices
from search_r1.search.manifest import Manifest, now
from verl.files import flush

logger = logging.getLogger(__name__)


def build(config: BuildConfig, corpus: Corpus, folder: Path) -> None:
    """Embed and index all documents; raises CorpusError, SetupError or IndexMismatch."""
    settings = _encoder_settings(config)
    devices = _devices(config)
    encoder = open_encoder(settings, config.max_length)
    check_pooling(encoder, config.pooling_method)
    manifest = _manifest(config, corpus, encoder)
    faiss_builder.check_factory(config.faiss_type, manifest.dim, len(corpus))
    with work_folder(folder, _key(config, manifest)) as work:
        if config.embedding_path is None:
            job = EncodeJob(
                work, config.corpus_path, settings, config.max_length, config.shard_rows
            )
            matrix = _embed(config, corpus, manifest, encoder, job, devices)
        else:
            corpus.check_rows(whole=True)
            matrix = _existing(Path(config.embedding_path), corpus, encoder, manifest.dim)
            _check_disk(config, work, manifest, embedded_bytes=0)
        ready = fresh_folder(work / READY_NAME)
        faiss_builder.build_faiss(
            matrix, config.faiss_type, ready / VECTORS_NAME, on_gpu=config.faiss_gpu
        )
        manifest.save(ready)
        publish(work, folder)
        _keep_embeddings(config, work)


def _encoder_settings(config: BuildConfig) -> EncoderConfig:
    """The encoder on the first device; raises SetupError for settings that cannot be."""
    if config.model_path is None:
        raise SetupError(
            f"--retrieval_method {config.retrieval_method} without --model_path; expected bm25, "
            "or another name together with an encoder: for example --model_path "
            "intfloat/e5-base-v2"
        )
    if config.embedding_dtype not in DTYPES:
        raise SetupError(f"--embedding_dtype {config.embedding_dtype}; expected float32 or float16")
    if config.faiss_gpu:
        faiss_builder.check_gpu()
    return EncoderConfig(
        config.model_path,
        encoder_family=config.encoder_family,
        pooling_method=config.pooling_method,
        encoder_batch_size=config.batch_size,
        encoder_dtype="float16" if config.use_fp16 else "float32",
        encoder_device=config.devices[0] if config.devices else None,
        trust_remote_code=config.trust_remote_code,
    )


def _devices(config: BuildConfig) -> tuple[str, ...]:
    """The devices that encode; the trial encoder knows no GPU."""
    is_trial = str(config.model_path).partition(":")[0] == "hash"
    return config.devices or (("cpu",) if is_trial else visible_devices())


def _manifest(config: BuildConfig, corpus: Corpus, encoder: Encoder) -> Manifest:
    """What the index will say of itself."""
    embedded = probe(encoder)
    return Manifest(
        config.retrieval_method,
        corpus.fingerprint,
        len(corpus),
        dtype=config.embedding_dtype,
        encoder=encoder.name,
        pooling=encoder.pooling,
        dim=len(embedded),
        probe=embedded,
        factory=config.faiss_type,
        max_length=config.max_length,
        query_prefix=encoder.query_prefix,
        passage_prefix=encoder.passage_prefix,
        normalizes=encoder.normalizes,
        created=now(),
        made_with=faiss_builder.MADE_WITH,
    )


def _key(config: BuildConfig, manifest: Manifest) -> dict[str, object]:
    """What decides the embeddings: only the same build goes on with them."""
    return {
        "corpus": asdict(manifest.corpus),
        "encoder": manifest.encoder,
        "probe": list(manifest.probe),
        "pooling": manifest.pooling,
        "dtype": manifest.dtype,
        "precision": "float16" if config.use_fp16 else "float32",
        "max_length": manifest.max_length,
        "shard_rows": config.shard_rows,
    }


def _embed(
    config: BuildConfig,
    corpus: Corpus,
    manifest: Manifest,
    encoder: Encoder,
    job: EncodeJob,
    devices: tuple[str, ...],
) -> Matrix:
    """The embeddings of the corpus, of which an earlier run may have made a part."""
    dim, dtype = manifest.dim, manifest.dtype
    file = EmbeddingFile.create(job.folder, len(corpus), dim, dtype, config.shard_rows)
    done = file.num_done
    row_bytes = dim * np.dtype(dtype).itemsize
    _check_disk(config, job.folder, manifest, (len(corpus) - done) * row_bytes)
    if done == 0:
        corpus.check_rows(whole=True)  # before hours of encoding
    else:
        logger.info("%d of %d documents are encoded already", done, len(corpus))
    encode(job, corpus, encoder, devices)
    return file.matrix


def _check_disk(config: BuildConfig, work: Path, manifest: Manifest, embedded_bytes: int) -> None:
    """Raise SetupError unless embeddings and index fit on the disk."""
    index = manifest.count * faiss_builder.bytes_per_vector(config.faiss_type, manifest.dim)
    parts = f"embeddings {gb(embedded_bytes)}, index about {gb(index)}"
    check_disk(work, embedded_bytes + index, parts)


def _existing(path: Path, corpus: Corpus, encoder: Encoder, dim: int) -> Matrix:
    """Embeddings made before; raises IndexMismatch if first or last are not this encoder's."""
    matrix = open_embeddings(path, len(corpus), dim)
    rows = [0, len(corpus) - 1]
    wanted = encoder.encode_passages([corpus[row].contents for row in rows])
    found = np.asarray(matrix[rows], dtype=np.float32)
    scale = np.linalg.norm(found, axis=1) * np.linalg.norm(wanted, axis=1)
    similarity = float(((found * wanted).sum(axis=1) / np.maximum(scale, 1e-12)).min())
    is_empty = not wanted.any() and not found.any()
    if similarity < 0.99 and not is_empty:
        raise IndexMismatch(
            f"embeddings {path} differ from what {encoder.name} makes of the corpus's first and "
            f"last documents (cosine {similarity:.3f}, expected 0.99); give the --model_path, "
            "--max_length and --corpus_path they were made with"
        )
    return matrix


def _keep_embeddings(config: BuildConfig, work: Path) -> None:
    """Move the embeddings beside the index if they are wanted."""
    made = work / "embeddings.npy"
    if config.save_embedding and made.exists():
        kept = Path(config.save_dir) / f"{config.retrieval_method}_embeddings.npy"
        made.replace(kept)
        flush(kept.parent)
        logger.info("the embeddings are in %s, for --embedding_path", kept)
