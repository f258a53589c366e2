"""Builds a BM25 or dense index of a jsonl corpus: `python -m search_r1.search.index_builder`.

`--save_dir DIR` receives `DIR/bm25/` or `DIR/<name>_<faiss_type>.index/`, each with a manifest of
what it was built from. A build that was killed goes on when the same command is run again; see
docs/indexing.md. The work is that of `bm25_builder` and `dense_builder`. `checksums` as the first
word adds checksums to an index and a corpus that have none, or compares them (`--verify`).
"""

import importlib
import logging
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

if not __package__:  # started as a file: the checkout may not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from search_r1.options import Bounds, run
from search_r1.plain import configure_logging
from search_r1.search import checksums
from search_r1.search.backends.dense import vectors_file
from search_r1.search.backends.flat_file import FlatFile, is_flat
from search_r1.search.corpus import Corpus
from search_r1.search.errors import SetupError
from search_r1.search.manifest import FILE_NAME

logger = logging.getLogger(__name__)

BM25 = ("bm25_builder", "BM25 needs bm25s", "bm25s")
DENSE = ("dense_builder", "a dense index needs FAISS", "faiss-cpu")
"""The module that builds, and what is said, with the package to install, where it cannot."""


@dataclass(frozen=True)
class BuildConfig:
    """What to index, how, and where to."""

    retrieval_method: str
    """bm25, or a name for a dense index such as e5"""
    corpus_path: str
    """jsonl with id and contents"""
    save_dir: str
    """folder that receives the index"""
    model_path: str | None = None
    """encoder: a folder, a hub name, or `hash` (no model, for trials); dense needs it"""
    use_fp16: bool = False
    """encode in half precision"""
    max_length: Annotated[int, Bounds(1)] | None = None
    """tokens of a passage that are encoded; default: the model's own limit"""
    batch_size: Annotated[int, Bounds(1)] = 64
    """passages per encoder call"""
    pooling_method: str | None = None
    """mean, cls or pooler; default: what the model folder or its family declares"""
    encoder_family: str | None = None
    """e5, e5-instruct, bge-en, bge, dpr, contriever or other: decides prefixes and pooling;
    default: by the model's name"""
    devices: tuple[str, ...] = ()
    """devices that share the encoding, one process each; default: all GPUs, else cpu"""
    faiss_type: str = "Flat"
    """a FAISS factory: Flat, HNSW64, SQ8, IVF4096,Flat ..."""
    faiss_gpu: bool = False
    """train IVF lists on the GPUs that FAISS sees"""
    embedding_dtype: str = "float32"
    """float32 or float16: how embeddings are kept"""
    save_embedding: bool = False
    """keep the embeddings beside the index"""
    embedding_path: str | None = None
    """index these embeddings (.npy, or bare values) instead of encoding the corpus"""
    shard_rows: Annotated[int, Bounds(1)] = 1024
    """documents between two saves, the most that a killed build loses"""
    trust_remote_code: bool = False
    """run Python code that comes with a model"""


@dataclass(frozen=True)
class ChecksumConfig:
    """Whose checksums are kept or compared."""

    index_path: str | None = None
    """the folder of an index, or a bare FAISS file"""
    corpus_path: str | None = None
    """its corpus, which a bare FAISS file is served with from then on, and no other"""
    verify: bool = False
    """compare all with the checksums that are there"""


def index_folder(save_dir: str | Path, method: str, faiss_type: str = "Flat") -> Path:
    """Where `build_index` puts the index of `method`."""
    factory = re.sub(r"[^A-Za-z0-9]+", "_", faiss_type)
    return Path(save_dir) / ("bm25" if method == "bm25" else f"{method}_{factory}.index")


def build_index(config: BuildConfig) -> Path:
    """Build the index, or replace an older one of ours; its folder. Raises CorpusError or
    SetupError."""
    corpus = Corpus.open(config.corpus_path)
    folder = index_folder(config.save_dir, config.retrieval_method, config.faiss_type)
    is_free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if not is_free and not (folder / FILE_NAME).is_file():  # as a download has it
        raise SetupError(
            f"{folder} is there and has no {FILE_NAME}, expected nothing or an index that "
            "index_builder made, which would be replaced; fix: another --save_dir, or move it away"
        )
    name, what, package = BM25 if config.retrieval_method == "bm25" else DENSE
    try:  # only its users need what builds an index
        builder = importlib.import_module(f"search_r1.search.index.{name}")
    except ImportError as error:
        raise SetupError(f"{what} ({error}); pip install {package}") from error
    builder.build(config, corpus, folder)
    logger.info("index of %d documents is in %s", len(corpus), folder)
    return folder


def keep_checksums(config: ChecksumConfig) -> int:
    """Keep checksums of index and corpus, or compare them; raises SearchError for any damage."""
    digest = ""
    for target in (Path(p) for p in (config.corpus_path, config.index_path) if p):
        if config.verify and target.exists() and not checksums.path_for(target).exists():
            raise SetupError(
                f"{target} has no checksums, expected those to compare it with; fix: the same "
                "command without --verify adds them"
            )
    if config.corpus_path is not None:
        if not config.verify:
            checksums.path_for(Path(config.corpus_path)).unlink(missing_ok=True)
        corpus = Corpus.open(config.corpus_path, whole=config.verify)
        corpus.check_rows(whole=True)
        digest = corpus.fingerprint.digest
    if config.index_path is not None:
        index = Path(config.index_path)
        if not index.exists() or not (index.is_file() or any(p.is_file() for p in index.glob("*"))):
            raise SetupError(f"--index_path {index} is no index; expected a file, or its folder")
        file = vectors_file(index)
        if file.is_file() and is_flat(file):
            FlatFile.open(file).check_finite(whole=True)
        if config.verify:
            checksums.check(index, whole=True)
        else:
            checksums.add(index, digest)
        logger.info("%s: %s", index, "as it was" if config.verify else "checksums added")
    return 0


def _build(config: BuildConfig) -> int:
    build_index(config)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Command-line entry; returns the exit status."""
    configure_logging(logging.INFO, "%(levelname)s %(message)s")
    words = sys.argv[1:] if argv is None else argv
    here = "search_r1.search.index_builder"
    if words[:1] == ["checksums"]:
        about = "Adds checksums to an index and a corpus, or compares them."
        kept = f"{here}:keep_checksums"
        return run(kept, ChecksumConfig, words[1:], prog="checksums", description=about)
    return run(f"{here}:_build", BuildConfig, words, prog="index_builder", description=__doc__)


if __name__ == "__main__":
    sys.exit(main())
