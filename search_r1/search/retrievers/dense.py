"""Dense retrieval: an encoder and an exact FAISS inner-product index, on CPU or on all GPUs."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import faiss

from search_r1.search.corpus import Corpus
from search_r1.search.encoder import Encoder, Vectors, open_encoder
from search_r1.search.errors import IndexMismatch, SetupError
from search_r1.search.manifest import PROBE_TEXT, Manifest
from search_r1.search.retrievers.base import Retriever
from search_r1.search.retrievers.locations import locate, open_corpus
from search_r1.search.retrievers.settings import RetrieverConfig
from search_r1.search.schema import Hit

logger = logging.getLogger(__name__)

VECTORS_NAME = "vectors.faiss"


class DenseRetriever:
    """Ranks documents by the inner product of query and passage embeddings."""

    num_threads = 1

    def __init__(self, name: str, index: faiss.Index, corpus: Corpus, encoder: Encoder) -> None:
        self.name = name
        self._index = index
        self._corpus = corpus
        self._encoder = encoder

    @classmethod
    def open(
        cls, name: str, path: Path, corpus: Corpus, encoder: Encoder, *, on_gpu: bool = False
    ) -> "DenseRetriever":
        """Open our index folder, or a bare FAISS file such as the published `e5_Flat.index`.

        Raises IndexMismatch if the index is not of this corpus and encoder.
        """
        if path.is_dir():
            manifest = Manifest.load(path)
            manifest.check_corpus(path, corpus.path, corpus.fingerprint)
            manifest.check_probe(path, encoder.name, probe(encoder))
        index = _read(path / VECTORS_NAME if path.is_dir() else path)
        _check_shape(path, index, corpus, encoder)
        return cls(name, _to_gpus(index) if on_gpu else index, corpus, encoder)

    @property
    def num_documents(self) -> int:
        """Documents that can be found."""
        return len(self._corpus)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """At most `k` hits per query, best first, ties by row."""
        if not queries:
            return []
        vectors = self._encoder.encode_queries(queries)
        scores, rows = self._index.search(vectors, min(k, len(self._corpus)))
        return [self._hits(*pair) for pair in zip(scores.tolist(), rows.tolist(), strict=True)]

    def _hits(self, scores: list[float], rows: list[int]) -> list[Hit]:
        ranked = sorted((-score, row) for score, row in zip(scores, rows, strict=True) if row >= 0)
        return [Hit(self._corpus[row], -negative) for negative, row in ranked]

    def info(self) -> dict[str, Any]:
        """Engine, encoder and the corpus."""
        encoder = {"encoder": self._encoder.name, "pooling": self._encoder.pooling}
        facts = {"engine": "faiss-flat", "dim": self._index.d, "dtype": "float32", **encoder}
        return {**facts, "corpus": asdict(self._corpus.fingerprint)}


def open_retriever(config: RetrieverConfig) -> Retriever:
    """The FAISS index and the encoder that the settings name."""
    corpus = open_corpus(config)
    path = locate(config, f"{config.retriever_name}_Flat.index")
    encoder = open_encoder(config.encoder)
    on_gpu = config.faiss.faiss_gpu
    return DenseRetriever.open(config.retriever_name, path, corpus, encoder, on_gpu=on_gpu)


def build(batches: Iterator[Vectors], folder: Path) -> int:
    """Write an exact inner-product index of all vectors into `folder`; returns their dim."""
    index = None
    for vectors in batches:
        index = index or faiss.IndexFlatIP(vectors.shape[1])
        index.add(vectors)
    assert index is not None, "a corpus has at least one document"
    faiss.write_index(index, str(folder / VECTORS_NAME))
    return int(index.d)


def probe(encoder: Encoder) -> tuple[float, ...]:
    """The encoder's embedding of the probe text, rounded for the manifest."""
    vector = encoder.encode_passages([PROBE_TEXT])[0]
    return tuple(round(float(x), 5) for x in vector)


def _read(path: Path) -> faiss.Index:
    """A memory-mapped FAISS index; raises SetupError if the file is missing or is not one."""
    if not path.is_file():
        raise SetupError(f"index {path} does not exist; expected a FAISS index: set --index_path")
    try:
        return faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        raise SetupError(
            f"{path} cannot be read by FAISS ({error}); expected a complete index file: "
            "build or download it again"
        ) from error


def _check_shape(path: Path, index: faiss.Index, corpus: Corpus, encoder: Encoder) -> None:
    """Raise IndexMismatch unless counts and dimensions agree."""
    if index.ntotal != len(corpus):
        raise IndexMismatch(
            f"index {path} holds {index.ntotal} vectors, but corpus {corpus.path} has "
            f"{len(corpus)} documents; give the corpus that the index was built from"
        )
    dim = encoder.encode_queries([PROBE_TEXT]).shape[1]
    if index.d != dim:
        raise IndexMismatch(
            f"index {path} has {index.d} dimensions, but encoder {encoder.name} gives {dim}; "
            "set --retriever_model to the encoder that the index was built with"
        )


def _to_gpus(index: faiss.Index) -> faiss.Index:
    """The index in half precision, sharded over all GPUs; raises SetupError without one."""
    num_gpus = faiss.get_num_gpus() if hasattr(faiss, "get_num_gpus") else 0
    if num_gpus == 0:
        raise SetupError(
            "--faiss_gpu, but this FAISS sees no GPU; expected a GPU build (faiss-gpu) and a "
            "visible GPU: install it, or leave --faiss_gpu out to search on CPU"
        )
    options = faiss.GpuMultipleClonerOptions()
    options.useFloat16 = True
    options.shard = True
    logger.info("moving the index to %d GPUs in float16", num_gpus)
    return faiss.index_cpu_to_all_gpus(index, co=options)
