"""Dense retrieval: an encoder, an index of vectors, and the corpus documents of its rows.

An index is a folder written by `index_builder` (`vectors.faiss` and a manifest) or a bare FAISS
file such as the published `e5_Flat.index`. The engines that search it are not imported here.
"""

import hashlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from search_r1.retrieval.corpus import Corpus, Mask
from search_r1.retrieval.encoder import Encoder, cuts_of, open_encoder
from search_r1.retrieval.encoders.families import Vectors
from search_r1.retrieval.encoders.prefixes import check_prefixes, recognised
from search_r1.retrieval.engines.base import Ranking, RowRetriever, stage
from search_r1.retrieval.engines.filtered import attach
from search_r1.retrieval.engines.own_rows import check_own_rows
from search_r1.retrieval.engines.vector_index import VectorIndex
from search_r1.retrieval.errors import IndexMismatch, SetupError
from search_r1.retrieval.manifest import Manifest, locate, open_corpus
from search_r1.retrieval.probes import PROBE_TEXT, check_probe
from search_r1.retrieval.settings import RetrieverConfig

logger = logging.getLogger(__name__)

VECTORS_NAME = "vectors.faiss"
STATIC_WEIGHT = 0.25
"""Weight in a hybrid of an encoder without attention; with 1 the whole finds less than BM25 alone
(docs/evidence/retrieval.md)."""
NUM_SAMPLES = 256
SAMPLE_BYTES = 4096
READ_CHUNK_BYTES = 1 << 24


class DenseEngine(RowRetriever):
    """Ranking of documents by inner product (or distance) of query and passage embeddings."""

    num_threads = 1

    def __init__(
        self, name: str, index: VectorIndex, digest: str, corpus: Corpus, encoder: Encoder
    ) -> None:
        self.name, self.num_documents = name, len(corpus)
        self.corpus, self._encoder = corpus, encoder
        self._index, self._digest = index, digest
        self.cuts = cuts_of(encoder)
        self.weight = STATIC_WEIGHT if getattr(encoder, "is_static", False) else 1.0

    def rank(self, queries: Sequence[str], k: int, allowed: Mask | None = None) -> Ranking:
        if not queries:
            return [], []
        with stage("encode"):
            vectors = encode_queries(self._encoder, queries)
        with stage("search"):
            return self._index.search(vectors, k, allowed)

    def info(self) -> dict[str, Any]:
        index = {**self._index.info(), "index": self._digest}
        corpus = asdict(self.corpus.fingerprint)
        return {**index, "encoder": self._encoder.info(), "corpus": corpus}


def encode_queries(encoder: Encoder, queries: Sequence[str]) -> Vectors:
    """Return vectors (num_queries, dim); raises SetupError for one that is not finite."""
    vectors = encoder.encode_queries(queries)
    bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(bad):
        raise SetupError(
            f"encoder {encoder.name}: got a vector that is not finite for the query "
            f"{queries[bad[0]][:80]!r}, expected numbers; fix: --encoder_dtype float32"
        )
    return vectors


def open_dense(config: RetrieverConfig, open_index: Callable[[Path], VectorIndex]) -> DenseEngine:
    """Open the configured corpus, encoder and index; raises IndexMismatch if they do not match."""
    corpus = open_corpus(config)
    path = locate_index(config)
    manifest = Manifest.load(path) if path.is_dir() else None
    if manifest:
        manifest.check_files(path, whole=config.verify)
    file = vectors_file(path)
    read_ahead(file)
    index = open_index(file)
    name = manifest.engine if manifest else config.retriever_name
    settings = recognised(config.encoder, name, manifest)
    encoder = open_encoder(settings)
    check_prefixes(encoder, settings, manifest, path)
    check(path, manifest, index, corpus, encoder)
    index.load(corpus, encoder)
    check_own_rows(config.retriever_name, path, index, corpus, encoder)
    engine = DenseEngine(config.retriever_name, index, index_digest(file), corpus, encoder)
    if manifest:
        attach(engine, path, manifest)
    return engine


def locate_index(config: RetrieverConfig) -> Path:
    """Return `index_path`, or `<name>_Flat.index` or else the only `<name>_*.index` inside it."""
    flat = f"{config.retriever_name}_Flat.index"
    parent = Path(config.index_path or "")
    prefix = f"{config.retriever_name}_"
    names = sorted(p.name for p in parent.glob("*.index") if p.name.startswith(prefix))
    if config.index_path is None or flat in names or not names:
        return locate(config, flat)
    if len(names) > 1:
        raise SetupError(
            f"--index_path {parent} holds {', '.join(names)}; expected one index: give "
            f"--index_path {parent / names[0]}"
        )
    return locate(config, names[0])


def vectors_file(path: Path) -> Path:
    """Return the FAISS file of an index, which is a folder or that file itself."""
    return path / VECTORS_NAME if path.is_dir() else path


def check(
    path: Path, manifest: Manifest | None, index: VectorIndex, corpus: Corpus, encoder: Encoder
) -> None:
    """Raise IndexMismatch unless the index, and its manifest if any, fit corpus and encoder."""
    if manifest:
        manifest.check_corpus(path, corpus.path, corpus.fingerprint)
        check_probe(manifest, path, encoder.name, probe(encoder))
    if index.num_rows != len(corpus):
        raise IndexMismatch(
            f"index {path} holds {index.num_rows} vectors, but corpus {corpus.path} has "
            f"{len(corpus)} documents; expected one for each: give the index's own corpus"
        )
    encoded = encoder.encode_queries([PROBE_TEXT]).shape[1]
    if index.dim != encoded:
        raise IndexMismatch(
            f"index {path} has {index.dim} dimensions, but encoder {encoder.name} gives {encoded}; "
            "expected the same number: set --retriever_model to the encoder that the index was "
            "built with"
        )


def probe(encoder: Encoder) -> tuple[float, ...]:
    """Return the encoder's embedding of the probe text, rounded for the manifest."""
    return tuple(round(float(x), 5) for x in encoder.encode_passages([PROBE_TEXT])[0])


def read_ahead(file: Path) -> threading.Thread:
    """Read a file in the background, while the encoder loads, so that it is in the page cache.

    A search that is the first to touch a mapped file reads it page by page, several times slower.
    """

    def read() -> None:
        buffer = bytearray(READ_CHUNK_BYTES)
        try:
            with file.open("rb", buffering=0) as data:
                while data.readinto(buffer):
                    pass
        except OSError as error:  # only a hint: the code that needs the file reports the error
            logger.info("not read ahead: %s", error)

    thread = threading.Thread(target=read, name="read-ahead", daemon=True)
    thread.start()
    return thread


def index_digest(file: Path) -> str:
    """Return a 64-bit hash (hex) of size and samples; other encoders change nearly all vectors."""
    size = file.stat().st_size
    hasher = hashlib.blake2b(str(size).encode(), digest_size=8)
    last = max(0, size - SAMPLE_BYTES)
    with file.open("rb") as data:
        for i in range(NUM_SAMPLES):
            data.seek(last * i // (NUM_SAMPLES - 1))
            hasher.update(data.read(SAMPLE_BYTES))
    return hasher.hexdigest()
