"""Builds a dense index (corpus → embeddings → FAISS); mistakes are errors before long work."""

import hashlib
import logging
import re
import struct
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt

from search_r1.retrieval.corpus import Corpus
from search_r1.retrieval.encoder import Encoder, open_encoder
from search_r1.retrieval.encoders.prefixes import check_prefixes
from search_r1.retrieval.engines.dense import VECTORS_NAME, probe
from search_r1.retrieval.engines.faiss_index import check_gpu
from search_r1.retrieval.engines.flat_file import check_finite, reason_of
from search_r1.retrieval.errors import SetupError
from search_r1.retrieval.fields import read_fields, save_fields
from search_r1.retrieval.index import build_folder
from search_r1.retrieval.index.build_folder import utc_now
from search_r1.retrieval.index.embeddings import (
    EmbeddingFile,
    Matrix,
    blocks,
    encode,
    fresh_cuts,
    report_cuts,
)
from search_r1.retrieval.index.encoding import (
    build_key,
    encoder_settings,
    load_embeddings,
    manifest_of,
)
from search_r1.retrieval.index.progress import progress
from search_r1.retrieval.index_builder import BuildConfig
from search_r1.retrieval.manifest import Manifest
from search_r1.retrieval.probes import check_probe
from search_r1.retrieval.settings import EncoderConfig
from verl.files import atomic_write, fsync
from verl.machine import format_bytes

logger = logging.getLogger(__name__)

MADE_WITH = f"faiss {faiss.__version__}"
MIN_POINTS, MAX_POINTS = 39, 256
"""Training vectors per centroid: FAISS warns below the first number and samples above the other."""
SCALAR_POINTS = 65536
"""Training vectors of a scalar quantizer, which learns only ranges."""
SEED = 1234
KEEP_SECONDS = 600.0
"""Least time between two writes of an unfinished index."""


def build(config: BuildConfig, corpus: Corpus, folder: Path) -> None:
    """Embed and index all documents; raises CorpusError, SetupError or IndexMismatch."""
    settings = encoder_settings(config)
    if config.faiss_gpu:
        check_gpu("train")
    encoder = open_encoder(settings[0], config.max_length)
    check_prefixes(encoder, settings[0])
    manifest = manifest_of(config, corpus, encoder, MADE_WITH)
    check_factory(config.faiss_type, manifest.dim, len(corpus))
    fields = read_fields(corpus, config.filter_fields)
    with build_folder.work_folder(folder, build_key(config, manifest)) as work:
        if config.embedding_path is None:
            matrix = _embed(config, corpus, manifest, encoder, settings, work)
        else:
            corpus.check_rows(whole=True)
            matrix = load_embeddings(Path(config.embedding_path), corpus, encoder, manifest.dim)
            check_room(config, work, manifest, embedded_bytes=0)
        ready = build_folder.fresh_folder(work / build_folder.READY_NAME)
        kept = work / kept_name(config)
        build_faiss(matrix, config.faiss_type, ready / VECTORS_NAME, kept, config.faiss_gpu)
        save_fields(fields, ready)
        replace(manifest, dtype=str(matrix.dtype)).save(ready)
        build_folder.publish(work, folder)
        embeddings = work / "embeddings.npy"
        if config.save_embedding and embeddings.exists():
            saved = Path(config.save_dir) / f"{config.retrieval_method}_embeddings.npy"
            embeddings.replace(saved)
            fsync(saved.parent)
            logger.info("the embeddings are in %s, for --embedding_path", saved)


def open_own_encoder(config: BuildConfig, manifest: Manifest, folder: Path) -> Encoder:
    """Open the encoder of an index. Raises IndexMismatch for another one, or damaged files."""
    manifest.check_files(folder, whole=False)
    settings = encoder_settings(config, manifest)[0]
    encoder = open_encoder(settings, manifest.max_length)
    check_prefixes(encoder, settings, manifest, folder)
    check_probe(manifest, folder, encoder.name, probe(encoder))
    return encoder


def append(
    config: BuildConfig, manifest: Manifest, corpus: Corpus, num_old: int, folder: Path
) -> None:
    """Add the documents of `corpus` from row `num_old` on to an index, which is read into memory.

    Raises IndexMismatch.
    """
    encoder = open_own_encoder(config, manifest, folder)
    fields = read_fields(corpus, manifest.filter_fields)
    cuts = fresh_cuts(encoder)
    index = faiss.read_index(str(folder / VECTORS_NAME))
    with build_folder.work_folder(folder, build_key(config, manifest)) as work:
        build_folder.check_disk(work, (folder / VECTORS_NAME).stat().st_size, "index")
        with progress("add", "documents", len(corpus) - num_old) as report:
            for start in range(num_old, len(corpus), config.shard_rows):
                rows = range(start, min(start + config.shard_rows, len(corpus)))
                passages = [document.contents for document in corpus.documents(rows)]
                vectors = encoder.encode_passages(passages).astype(manifest.dtype).astype("f4")
                check_finite(folder, start, vectors)
                index.add(vectors)
                report(rows.stop - num_old)
        report_cuts(cuts)
        ready = build_folder.fresh_folder(work / build_folder.READY_NAME)
        faiss.write_index(index, str(ready / VECTORS_NAME))
        save_fields(fields, ready)
        grown = replace(manifest, corpus=corpus.fingerprint, count=len(corpus), created=utc_now())
        grown.save(ready)
        build_folder.publish(work, folder)


def _embed(
    config: BuildConfig,
    corpus: Corpus,
    manifest: Manifest,
    encoder: Encoder,
    settings: list[EncoderConfig],
    work: Path,
) -> Matrix:
    """Return the embeddings of the corpus; shards that an earlier run finished are reused."""
    dim, dtype = manifest.dim, manifest.dtype
    file = EmbeddingFile.create(work, len(corpus), dim, dtype, config.shard_rows)
    done = file.num_done
    check_room(config, work, manifest, (len(corpus) - done) * dim * np.dtype(dtype).itemsize)
    if done == 0:
        corpus.check_rows(whole=True)  # before encoding, which can take hours
    else:
        logger.info("%d of %d documents are encoded already", done, len(corpus))
    report_cuts(encode(file, corpus, encoder, settings, config.max_length))
    return file.matrix


def check_room(config: BuildConfig, work: Path, manifest: Manifest, embedded_bytes: int) -> None:
    """Raise SetupError if the disk lacks room for embeddings, index and what resumes its build."""
    index = manifest.count * bytes_per_vector(config.faiss_type, manifest.dim)
    parts = f"embeddings {format_bytes(embedded_bytes)}, index about {format_bytes(index)}"
    need = embedded_bytes + index
    if config.faiss_type != "Flat":
        kept = work / kept_name(config)
        more = max(0, index - (kept.stat().st_size if kept.exists() else 0))
        parts, need = f"{parts}, {format_bytes(more)} more to resume its build", need + more
    build_folder.check_disk(work, need, parts)


def kept_name(config: BuildConfig) -> str:
    """Return the name of an unfinished index; another factory or other embeddings have another."""
    facts: list[object] = [config.faiss_type]
    if config.embedding_path is not None:
        status = Path(config.embedding_path).stat()
        facts += [status.st_size, status.st_mtime_ns]
    return f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.index"


def check_factory(factory: str, dim: int, count: int) -> None:
    """Raise SetupError unless FAISS has `factory` for `dim` and `count` vectors can train it."""
    try:
        _try_factory(factory, dim, count)
    except RuntimeError as error:
        raise SetupError(
            f"--faiss_type {factory} cannot be made for {dim} dimensions "
            f"({reason_of(error)}); expected a FAISS factory such as Flat, HNSW64, SQ8, "
            "IVF4096,Flat or IVF4096,PQ64, where the number after PQ divides the dimensions"
        ) from error
    min_count = MIN_POINTS * num_centroids(factory)
    if count < min_count:
        raise SetupError(
            f"--faiss_type {factory} needs {min_count} documents to train its "
            f"{num_centroids(factory)} centroids, but the corpus has {count}; expected a factory "
            f"for a smaller corpus: Flat, SQ8, or at most {count // MIN_POINTS} lists in IVF"
        )


def _try_factory(factory: str, dim: int, count: int) -> None:
    """Create the index and, if it needs no training, add vectors; raises RuntimeError on failure.

    FAISS creates some kinds that then accept no vectors (IDMap, NSG) or find none (IVF0).
    """
    if re.search(r"(?:IVF|HNSW)0+(?!\d)", factory):
        raise RuntimeError("0 lists or links find nothing")
    index = _create_index(factory, dim)
    bytes_per_vector(factory, dim)
    if isinstance(index, faiss.IndexIDMap):
        raise RuntimeError("IDMap needs ids, but the vectors are numbered by corpus row")
    for output_dim in map(int, re.findall(r"PCA[RW]*(\d+)", factory)):
        if output_dim > dim:
            raise RuntimeError(f"PCA to {output_dim}")
    if index.is_trained:
        sample = np.random.default_rng(SEED).normal(size=(min(count, 2 * dim), dim))
        index.add(sample.astype(np.float32))


def num_centroids(factory: str) -> int:
    """Return the largest number of centroids that a part of `factory` learns, 0 if none."""
    lists = [int(n) for n in re.findall(r"IVF(\d+)", factory)]
    bits = [int(n or 8) for n in re.findall(r"(?<!O)PQ\d+(?:x(\d+))?", factory)]
    return max(lists + [2**n for n in bits], default=0)


def bytes_per_vector(factory: str, dim: int) -> int:
    """Return the approximate size of one vector in the index, in bytes."""
    links = [int(n) for n in re.findall(r"HNSW(\d+)", factory) if "IVF" not in factory]
    if links:
        codes = dim if "SQ8" in factory else 4 * dim
        return codes + 4 * (2 * links[0] + links[0] // 8) + 20
    return int(_create_index(factory, dim).sa_code_size()) + (8 if "IVF" in factory else 0)


def build_faiss(
    matrix: Matrix,
    factory: str,
    path: Path,
    kept: Path,
    on_gpu: bool = False,
    keep_seconds: float = KEEP_SECONDS,
) -> None:
    """Build the index of all rows of `matrix` (num_documents, dim) and write it to `path`.

    What has been trained and added is written to `kept` after at least `keep_seconds` each time; a
    later call goes on from there.
    """
    if factory == "Flat":
        _write_flat(matrix, path)
        return
    for part in kept.parent.glob(f".{kept.name}.*.part"):
        part.unlink()  # of a build that was killed while it wrote
    if kept.exists():
        index = faiss.read_index(str(kept))
        logger.info("%d of %d vectors are in the index already", index.ntotal, len(matrix))
    else:
        index = _create_index(factory, matrix.shape[1])
        if not index.is_trained:
            _train(index, matrix, factory, on_gpu)
            _keep(index, kept)
    saved, wait = time.monotonic(), keep_seconds
    for vectors in _blocks_with_progress(matrix, f"add to {factory}", index.ntotal):
        index.add(vectors)
        if time.monotonic() - saved > wait:
            began = time.monotonic()
            _keep(index, kept)
            saved = time.monotonic()
            wait = max(keep_seconds, 10 * (saved - began))
    faiss.write_index(index, str(path))


def _keep(index: Any, kept: Path) -> None:
    with atomic_write(kept, is_durable=True) as part:
        faiss.write_index(index, str(part))


def _train(index: Any, matrix: Matrix, factory: str, on_gpu: bool) -> None:
    """Train an index on a sample of the rows."""
    sample = training_sample(matrix, factory)
    logger.info("training %s on %d of %d vectors", factory, len(sample), len(matrix))
    inverted = faiss.try_extract_index_ivf(index)
    if on_gpu and inverted is not None:
        flat = faiss.IndexFlatIP(inverted.d)
        inverted.clustering_index = faiss.index_cpu_to_all_gpus(flat)
    index.train(sample)


def training_sample(matrix: Matrix, factory: str) -> npt.NDArray[np.float32]:
    """Return the seeded sample of rows for training `factory`, in row order."""
    num_rows = min(len(matrix), MAX_POINTS * num_centroids(factory) or SCALAR_POINTS)
    rows = np.random.default_rng(SEED).choice(len(matrix), num_rows, replace=False)
    sample = np.ascontiguousarray(matrix[np.sort(rows)], dtype=np.float32)
    if not np.isfinite(sample).all():
        for _ in blocks(matrix):  # raises an error that names the row
            pass
    return sample


def _create_index(factory: str, dim: int) -> Any:
    return faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)


def _write_flat(matrix: Matrix, path: Path) -> None:
    """Write a Flat index as a stream, with the bytes of FAISS but without the matrix in memory.

    In an empty index the row count is bytes 8 to 15 (after kind and dimensions), the value count
    the last 8.
    """
    empty = faiss.serialize_index(faiss.IndexFlatIP(matrix.shape[1])).tobytes()
    assert empty[8:16] == empty[-8:] == bytes(8), "unexpected format of a FAISS Flat index"
    rows, values = struct.pack("<q", len(matrix)), struct.pack("<Q", matrix.size)
    with path.open("wb") as file:
        file.write(empty[:8] + rows + empty[16:-8] + values)
        for vectors in _blocks_with_progress(matrix, "write Flat"):
            file.write(memoryview(vectors.data).cast("B"))


def _blocks_with_progress(
    matrix: Matrix, job: str, done: int = 0
) -> Iterator[npt.NDArray[np.float32]]:
    """Yield the rows from `done` on, in blocks."""
    with progress(job, "vectors", len(matrix)) as report:
        for vectors in blocks(matrix, start=done):
            yield vectors
            done += len(vectors)
            report(done)
