"""Builds a BM25 or dense index of a jsonl corpus: `python -m search_r1.search.index_builder`.

The index is written to `SAVE_DIR/bm25/` or `SAVE_DIR/<name>_<faiss_type>.index/`, with a manifest
of what it was built from; `--to` fills a collection of a distributed engine instead, and
`search-r1 index append` adds passages to a corpus and its indexes. After an interruption, the same
command resumes; see docs/guides/retrieval.md. The builders are in `search_r1.retrieval.index`.
"""

import importlib
import logging
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Annotated, Literal

from search_r1.options import Bounds, run
from search_r1.plain import configure_logging
from search_r1.retrieval.errors import SetupError
from verl.errors import explain, redact

logger = logging.getLogger(__name__)

BM25 = ("bm25_builder", "BM25 needs bm25s", "bm25s")
DENSE = ("dense_builder", "a dense index needs FAISS", "faiss-cpu")
REMOTE = ("remote_builder", "a collection needs numpy", "numpy")
"""Builder module, and the message and package to install if it cannot be imported."""
FALLEN = (
    "it stored a checksum of every megabyte and is gone since 2026-11-28; the manifest has size "
    "and SHA-256 of each file, which the server's --verify compares"
)
"""The answer to the command `checksums`."""


@dataclass(frozen=True)
class BuildConfig:
    """What is indexed, how, and where."""

    COMMON = ("retrieval_method", "corpus_path", "save_dir", "model_path", "devices", "batch_size",
              "faiss_type", "filter_fields", "analyzer", "to")  # fmt: skip

    retrieval_method: str
    """bm25, a name for a dense index, such as e5, or both: bm25+e5"""
    corpus_path: str
    """jsonl file with id and contents"""
    save_dir: str = ""
    """folder in which the index is created"""
    model_path: str | None = None
    """encoder model, required for a dense index: folder, Hugging Face name, or `hash` (no model,
    for trials)"""
    use_fp16: bool = False
    """encode in half precision"""
    max_length: Annotated[int, Bounds(1)] | None = None
    """longest passage in tokens; the rest is cut off; default: the model's own limit"""
    batch_size: Annotated[int, Bounds(1)] = 64
    """passages per encoder call"""
    pooling_method: str | None = None
    """mean, cls or pooler; default: as declared by the model folder or its family"""
    encoder_family: str | None = None
    """family of the model: e5, e5-instruct, bge-en, bge, dpr, contriever or other; determines
    prefixes and pooling; default: from the names of model and index"""
    devices: tuple[str, ...] = ()
    """devices that encode in parallel, one process each; default: all GPUs, else cpu"""
    faiss_type: str = "Flat"
    """FAISS factory string: Flat, HNSW64, SQ8, IVF4096,Flat ..."""
    faiss_gpu: bool = False
    """train IVF lists on all GPUs visible to FAISS"""
    embedding_dtype: str = "float32"
    """data type in which embeddings are stored: float32 or float16"""
    save_embedding: bool = False
    """keep the embeddings beside the index"""
    embedding_path: str | None = None
    """index the embeddings in this file (.npy or raw values) instead of encoding the corpus"""
    shard_rows: Annotated[int, Bounds(1)] = 1024
    """documents between two saves: the most that a killed build has to repeat"""
    filter_fields: tuple[str, ...] = ()
    """fields of the corpus by which searches can be limited"""
    analyzer: Literal["folded", "scripts"] | None = None
    """words of a bm25 index: folded, or scripts, which also makes words of scripts without spaces
    (Chinese, Japanese, Thai, ...) and with vowel signs (Hindi, ...); default: by the corpus"""
    trust_remote_code: bool = False
    """run Python code that comes with a model"""
    to: str | None = None
    """collection of a distributed engine to fill instead: milvus://host:19530/collection,
    milvus:file.db/collection, elastic+https://host/index ...; its token is in INDEX_TOKEN"""


@dataclass(frozen=True)
class AppendConfig:
    """What is added, and to which corpus and indexes."""

    passages: str
    """jsonl file with the new passages, in the form of a corpus"""
    corpus_path: str
    """corpus (jsonl) that gets them; it is replaced by a longer file"""
    save_dir: str
    """folder of its indexes, all of which get them"""
    model_path: str | None = None
    """encoder of the dense indexes among them: folder, Hugging Face name, or `hash`"""
    use_fp16: bool = False
    """encode in half precision"""
    batch_size: Annotated[int, Bounds(1)] = 64
    """passages per encoder call"""
    pooling_method: str | None = None
    """mean, cls or pooler; default: as declared by the model folder or its family"""
    encoder_family: str | None = None
    """family of the model; default: from the names of model and index"""
    trust_remote_code: bool = False
    """run Python code that comes with a model"""


def index_folder(save_dir: str | Path, method: str, faiss_type: str = "Flat") -> Path:
    """Return the folder in which `build_index` creates the index of `method`."""
    factory = re.sub(r"[^A-Za-z0-9]+", "_", faiss_type)
    return Path(save_dir) / ("bm25" if method == "bm25" else f"{method}_{factory}.index")


def build_index(config: BuildConfig) -> Path:
    """Build or replace the index and return its folder; raises CorpusError or SetupError."""
    from search_r1.retrieval.corpus import Corpus  # noqa: PLC0415 - numpy, for which --help waits
    from search_r1.retrieval.manifest import FILE_NAME  # noqa: PLC0415 - as above

    if bool(config.to) == bool(config.save_dir):
        got = f"--save_dir {config.save_dir!r} and --to {redact(config.to or 'nothing')}"
        raise SetupError(explain("index", got, "one of them", "name a folder or a collection"))
    if bad := [name for name in config.filter_fields if "=" in name or not name]:
        expected, fix = "names without =", "rename the field in the corpus"
        raise SetupError(explain("--filter_fields", bad[0], expected, fix))
    if "+" in config.retrieval_method:
        return _build_parts(config)
    corpus = Corpus.open(config.corpus_path)
    if config.to:
        _import(REMOTE).fill(config, corpus)
        return Path(config.to)
    folder = index_folder(config.save_dir, config.retrieval_method, config.faiss_type)
    is_free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if not is_free and not (folder / FILE_NAME).is_file():  # for example a downloaded index
        raise SetupError(
            f"{folder} exists and has no {FILE_NAME}, expected nothing or an index that "
            "index_builder made, which would be replaced; fix: another --save_dir, or move it away"
        )
    if config.retrieval_method != "bm25" and config.model_path:
        from search_r1.retrieval.encoders.model_name import check_model_name  # noqa: PLC0415

        check_model_name("model_path", config.model_path)  # before FAISS and torch are imported
    import_builder(config.retrieval_method).build(config, corpus, folder)
    logger.info("index of %d documents is in %s", len(corpus), folder)
    return folder


def _build_parts(config: BuildConfig) -> Path:
    """Build the indexes of a hybrid, such as bm25+e5, in one folder, which is returned."""
    if config.to:
        fix = "name a folder, or one engine"
        raise SetupError(explain("--to", redact(config.to), "--save_dir for a hybrid", fix))
    for method in config.retrieval_method.split("+"):
        factory = "Flat" if method == "bm25" else config.faiss_type
        build_index(replace(config, retrieval_method=method, faiss_type=factory))
    return Path(config.save_dir)


def import_builder(method: str) -> ModuleType:
    """Import the module that builds indexes of `method`. Raises SetupError."""
    return _import(BM25 if method == "bm25" else DENSE)


def _import(entry: tuple[str, str, str]) -> ModuleType:
    """Import a builder; only now, because each needs packages of its own."""
    name, message, package = entry
    try:
        return importlib.import_module(f"search_r1.retrieval.index.{name}")
    except ImportError as error:
        raise SetupError(f"{message} ({error}); pip install {package}") from error


def _build(config: BuildConfig) -> int:
    build_index(config)
    return 0


def main(argv: list[str] | None = None) -> int:
    configure_logging(logging.INFO, "%(levelname)s %(message)s")
    arguments = sys.argv[1:] if argv is None else argv
    module = "search_r1.retrieval.index_builder"
    if arguments[:1] == ["checksums"]:
        sys.stderr.write(f"search-r1 index: got checksums, expected flags; fix: {FALLEN}\n")
        return 2
    if arguments[:1] == ["append"]:
        return run("search_r1.retrieval.index.appending:run", AppendConfig, arguments[1:],
                   prog="search-r1 index append",
                   description="Adds passages to a corpus and its indexes.")  # fmt: skip
    target = f"{module}:_build"
    return run(target, BuildConfig, arguments, prog="search-r1 index", description=__doc__)


if __name__ == "__main__":
    sys.exit(main())
