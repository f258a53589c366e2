"""Where the settings say that corpus and index lie, with an error that names what is missing."""

from pathlib import Path

from search_r1.search import checksums
from search_r1.search.backends.settings import RetrieverConfig
from search_r1.search.corpus import Corpus
from search_r1.search.errors import IndexMismatch, SetupError
from search_r1.search.manifest import build_command


def open_corpus(config: RetrieverConfig) -> Corpus:
    """The corpus that the settings name, checked; raises SetupError without one."""
    if config.corpus_path is None:
        raise SetupError(
            f"--retriever_name {config.retriever_name} without --corpus_path; expected a jsonl "
            "corpus, for example --corpus_path example/corpus.jsonl"
        )
    corpus = Corpus.open(config.corpus_path, whole=config.verify)
    corpus.check_rows(whole=config.verify)
    return corpus


def check_files(config: RetrieverConfig, index: Path, corpus: Corpus | None) -> None:
    """Raise IndexMismatch for a damaged index, or one whose checksums name another corpus."""
    known = checksums.check(index, whole=config.verify)
    if known and known.corpus and corpus and known.corpus != corpus.fingerprint.digest:
        raise IndexMismatch(
            f"index {index}: got the corpus {corpus.path} with hash {corpus.fingerprint.digest}, "
            f"expected hash {known.corpus}; fix: give the corpus that its checksums were made with"
        )


def locate(config: RetrieverConfig, index_name: str) -> Path:
    """The index itself, when `index_path` is it or the folder around it."""
    command = build_command(str(config.corpus_path), "<folder>", config.retriever_name)
    if not config.index_path:
        raise SetupError(
            f"--retriever_name {config.retriever_name} without --index_path; build an index "
            f"first: `{command}`"
        )
    path = Path(config.index_path)
    inner = path / index_name
    if inner.exists():
        return inner
    if not path.exists():
        raise SetupError(
            f"index {path} does not exist; expected a built index: set --index_path, or build "
            f"one: `{command}`"
        )
    return path
