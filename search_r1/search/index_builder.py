"""Builds a BM25 or dense index of a jsonl corpus: `python -m search_r1.search.index_builder`.

`--save_dir DIR` receives `DIR/bm25/` or `DIR/<name>_Flat.index/`, each with a manifest of what it
was built from. An index is built aside and renamed when complete, so a killed run leaves none.
"""

import argparse
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from search_r1.search.corpus import Corpus
from search_r1.search.encoder import Encoder, Vectors, check_pooling, open_encoder
from search_r1.search.errors import SearchError, SetupError
from search_r1.search.manifest import Manifest
from search_r1.search.retrievers.settings import EncoderConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BuildConfig:
    """What to index, how, and where to."""

    retrieval_method: str
    """`bm25`, or any other name (`e5` ...) for a dense index under that name."""
    corpus_path: str
    save_dir: str
    model_path: str | None = None
    """Encoder folder or hub name; dense indexes need it."""
    batch_size: int = 64
    """Passages per encoder call."""
    max_length: int | None = None
    """Tokens of a passage that are encoded; the model's own limit if None."""
    use_fp16: bool = False
    """Encode in half precision; the index itself is float32."""
    pooling_method: str | None = None
    """Checked against what the model folder declares."""


def index_folder(save_dir: str | Path, method: str) -> Path:
    """Where `build_index` puts the index of `method`."""
    return Path(save_dir) / ("bm25" if method == "bm25" else f"{method}_Flat.index")


def build_index(config: BuildConfig) -> Path:
    """Build the index and return its folder; an older one there is replaced when it is complete.

    Raises CorpusError for a malformed row, SetupError for a missing encoder or package.
    """
    corpus = Corpus.open(config.corpus_path)
    folder = index_folder(config.save_dir, config.retrieval_method)
    build = _build_bm25 if config.retrieval_method == "bm25" else _build_dense
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise SetupError(
            f"cannot write an index into {folder.parent} ({error}); expected a writable folder: "
            "build it elsewhere with index_builder --save_dir, and give that as --index_path"
        ) from error
    try:
        build(config, corpus, aside).save(aside)
        _swap(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    logger.info("index of %d documents is in %s", len(corpus), folder)
    return folder


def _build_bm25(config: BuildConfig, corpus: Corpus, folder: Path) -> Manifest:
    try:
        from search_r1.search.retrievers import bm25  # noqa: PLC0415
    except ImportError as error:
        raise SetupError(f"BM25 needs bm25s ({error}); pip install bm25s") from error
    progress = tqdm(corpus, total=len(corpus), desc="tokenise", unit="doc")
    bm25.build((document.contents for document in progress), folder)
    return Manifest("bm25", corpus.fingerprint, len(corpus))


def _build_dense(config: BuildConfig, corpus: Corpus, folder: Path) -> Manifest:
    try:
        from search_r1.search.retrievers import dense  # noqa: PLC0415
    except ImportError as error:
        raise SetupError(f"a dense index needs FAISS ({error}); pip install faiss-cpu") from error
    encoder = _load_encoder(config)
    check_pooling(encoder, config.pooling_method)
    dim = dense.build(_encode(corpus, encoder, config.batch_size), folder)
    return Manifest(
        config.retrieval_method,
        corpus.fingerprint,
        len(corpus),
        dtype="float32",
        encoder=encoder.name,
        pooling=encoder.pooling,
        dim=dim,
        probe=dense.probe(encoder),
    )


def _load_encoder(config: BuildConfig) -> Encoder:
    if config.model_path is None:
        raise SetupError(
            f"--retrieval_method {config.retrieval_method} without --model_path; expected bm25, "
            "or another name together with an encoder: for example --model_path "
            "intfloat/e5-base-v2"
        )
    options = EncoderConfig(
        config.model_path,
        encoder_batch_size=config.batch_size,
        encoder_dtype="float16" if config.use_fp16 else "float32",
    )
    return open_encoder(options, config.max_length)


def _encode(corpus: Corpus, encoder: Encoder, batch_size: int) -> Iterator[Vectors]:
    """Embeddings of all documents, in row order, batch by batch."""
    with tqdm(total=len(corpus), desc="encode", unit="doc") as progress:
        for start in range(0, len(corpus), batch_size):
            rows = range(start, min(start + batch_size, len(corpus)))
            yield encoder.encode_passages([d.contents for d in corpus.documents(rows)])
            progress.update(len(rows))


def _swap(aside: Path, folder: Path) -> None:
    """Put the complete index in place of an older one."""
    aside.chmod(0o755)
    outdated = aside.with_name(aside.name + ".old")
    if folder.exists():
        folder.rename(outdated)
    os.rename(aside, folder)
    shutil.rmtree(outdated, ignore_errors=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="index_builder", description=__doc__)
    add = parser.add_argument
    add("--retrieval_method", required=True, help="bm25, or a name for a dense index such as e5")
    add("--corpus_path", required=True, help="jsonl with id and contents")
    add("--save_dir", required=True, help="folder that receives the index")
    add("--model_path", help="encoder folder or hub name (dense)")
    add("--batch_size", type=_positive, default=BuildConfig.batch_size, help="passages a batch")
    add("--max_length", type=_positive, help="tokens encoded of a passage")
    add("--use_fp16", action="store_true", help="encode in half precision")
    add("--pooling_method", help="refused unless it is what the model declares")
    add("--faiss_type", default="Flat", help="only Flat")
    for name, advice in WITHOUT_EFFECT.items():
        add(f"--{name}", nargs="?", const=True, help=f"no effect: {advice}")
    return parser


WITHOUT_EFFECT = {
    "save_embedding": "embeddings go into the index as they are made",
    "embedding_path": "embeddings are always computed from --corpus_path",
    "faiss_gpu": "building a flat index needs no GPU; give it to the server",
}


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected 1 or more")
    return value


def _config(args: argparse.Namespace) -> BuildConfig:
    """The build that the flags ask for; warns of flags without effect."""
    if args.faiss_type != "Flat":
        raise SetupError(f"--faiss_type {args.faiss_type}; expected Flat (exact search)")
    for name, advice in WITHOUT_EFFECT.items():
        if getattr(args, name) is not None:
            logger.warning("--%s has no effect: %s", name, advice)
    ignored = {*WITHOUT_EFFECT, "faiss_type"}
    return BuildConfig(**{k: v for k, v in vars(args).items() if k not in ignored})


def main(argv: list[str] | None = None) -> int:
    """Command-line entry; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    args = _parser().parse_args(argv)
    try:
        build_index(_config(args))
    except SearchError as error:
        sys.stderr.write(f"index_builder: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
