"""Dense retrieval: an encoder, an index of vectors, and the documents of its rows.

An index is our folder (`vectors.faiss` and a manifest) or a bare FAISS file such as the published
`e5_Flat.index`. What searches it is in `faiss_index` and `torch_flat`: this module loads neither.
"""

import hashlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from search_r1.search.backends.base import stage
from search_r1.search.corpus import Corpus
from search_r1.search.encoder import Encoder, open_encoder
from search_r1.search.encoders.families import Vectors
from search_r1.search.errors import IndexMismatch, SetupError
from search_r1.search.manifest import PROBE_TEXT, Manifest, check_files, locate, open_corpus
from search_r1.search.schema import Hit
from search_r1.search.settings import RetrieverConfig

logger = logging.getLogger(__name__)

VECTORS_NAME = "vectors.faiss"
NUM_SAMPLES = 256
SAMPLE_BYTES = 4096
READ_BYTES = 1 << 24


class VectorIndex(Protocol):
    """Rows with the highest scores; answers do not depend on which queries came together."""

    num_rows: int
    dim: int

    def load(self, corpus: Corpus, encoder: Encoder) -> None:
        """Make it ready to search, once it is known to fit corpus and encoder."""
        ...

    def search(self, queries: Vectors, k: int) -> tuple[list[list[float]], list[list[int]]]:
        """Scores and rows of at most `k` vectors per query, best first, ties by row."""
        ...

    def info(self) -> dict[str, Any]:
        """What decides a score."""
        ...


class DenseRetriever:
    """Ranks documents by the inner product (or distance) of query and passage embeddings."""

    num_threads = 1

    def __init__(
        self, name: str, index: VectorIndex, digest: str, corpus: Corpus, encoder: Encoder
    ) -> None:
        """`digest` identifies the file of the index."""
        self.name, self.num_documents = name, len(corpus)
        self._index, self._digest = index, digest
        self.corpus, self._encoder = corpus, encoder

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """At most `k` hits per query, best first, ties by row."""
        if not queries:
            return []
        with stage("encode"):
            vectors = self._encoder.encode_queries(queries)
        with stage("search"):
            scores, rows = self._index.search(vectors, k)
        with stage("documents"):
            documents = iter(self.corpus.documents([row for found in rows for row in found]))
            return [[Hit(next(documents), score) for score in found] for found in scores]

    def info(self) -> dict[str, Any]:
        """Backend, index, encoder and the corpus."""
        index = {**self._index.info(), "index": self._digest}
        corpus = asdict(self.corpus.fingerprint)
        return {**index, "encoder": self._encoder.info(), "corpus": corpus}


def open_dense(
    config: RetrieverConfig, open_index: Callable[[Path], VectorIndex]
) -> DenseRetriever:
    """Corpus, encoder and index of the settings; raises IndexMismatch if they do not belong."""
    corpus = open_corpus(config)
    path = locate_index(config)
    check_files(config, path, corpus)
    file = vectors_file(path)
    read_ahead(file)
    index = open_index(file)
    encoder = open_encoder(config.encoder)
    check(path, index, corpus, encoder)
    index.load(corpus, encoder)
    return DenseRetriever(config.retriever_name, index, index_digest(file), corpus, encoder)


def locate_index(config: RetrieverConfig) -> Path:
    """Our folder or a bare file: `<name>_Flat.index`, else the only `<name>_*.index`."""
    flat = f"{config.retriever_name}_Flat.index"
    around = Path(config.index_path or "")
    prefix = f"{config.retriever_name}_"
    found = sorted(p.name for p in around.glob("*.index") if p.name.startswith(prefix))
    if config.index_path is None or flat in found or not found:
        return locate(config, flat)
    if len(found) > 1:
        raise SetupError(
            f"--index_path {around} holds {', '.join(found)}; expected one index: give "
            f"--index_path {around / found[0]}"
        )
    return locate(config, found[0])


def vectors_file(path: Path) -> Path:
    """The FAISS file of an index that is our folder or that file itself."""
    return path / VECTORS_NAME if path.is_dir() else path


def check(path: Path, index: VectorIndex, corpus: Corpus, encoder: Encoder) -> None:
    """Raise IndexMismatch unless an index, and its manifest if any, fit corpus and encoder."""
    if path.is_dir():
        manifest = Manifest.load(path)
        manifest.check_corpus(path, corpus.path, corpus.fingerprint)
        manifest.check_probe(path, encoder.name, probe(encoder))
    if index.num_rows != len(corpus):
        raise IndexMismatch(
            f"index {path} holds {index.num_rows} vectors, but corpus {corpus.path} has "
            f"{len(corpus)} documents; expected one for each: give the index's own corpus"
        )
    encoded = encoder.encode_queries([PROBE_TEXT]).shape[1]
    if index.dim != encoded:
        raise IndexMismatch(
            f"index {path} has {index.dim} dimensions, but encoder {encoder.name} gives {encoded}; "
            "expected as many: set --retriever_model to the encoder that the index was built with"
        )


def probe(encoder: Encoder) -> tuple[float, ...]:
    """The encoder's embedding of the probe text, rounded for the manifest."""
    vector = encoder.encode_passages([PROBE_TEXT])[0]
    return tuple(round(float(x), 5) for x in vector)


def read_ahead(file: Path) -> threading.Thread:
    """Read a file from end to end in the background, so that it is in memory when it is needed.

    The encoder takes seconds to load meanwhile, and a mapped file that is first read by a search
    comes page by page, several times slower than in a row.
    """

    def read() -> None:
        buffer = bytearray(READ_BYTES)
        try:
            with file.open("rb", buffering=0) as data:
                while data.readinto(buffer):
                    pass
        except OSError as error:  # whoever needs the file reports it
            logger.info("not read ahead: %s", error)

    thread = threading.Thread(target=read, name="read-ahead", daemon=True)
    thread.start()
    return thread


def index_digest(file: Path) -> str:
    """64-bit hash (hex) of a file's size and of samples: nearly every vector would differ."""
    size = file.stat().st_size
    hasher = hashlib.blake2b(str(size).encode(), digest_size=8)
    last = max(0, size - SAMPLE_BYTES)
    with file.open("rb") as data:
        for i in range(NUM_SAMPLES):
            data.seek(last * i // (NUM_SAMPLES - 1))
            hasher.update(data.read(SAMPLE_BYTES))
    return hasher.hexdigest()
