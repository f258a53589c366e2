"""Index manifests, and checks that an index is complete and matches its corpus and encoder."""

import logging
import textwrap
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from pydantic import ConfigDict, TypeAdapter

from search_r1.retrieval.corpus import Corpus, Fingerprint
from search_r1.retrieval.errors import IndexMismatch, SetupError
from search_r1.retrieval.settings import RetrieverConfig
from verl.files import read_text, sha256

logger = logging.getLogger(__name__)

FILE_NAME = "manifest.json"


@dataclass(frozen=True)
class FileFacts:
    """What identifies the content of a file of an index."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What an index was built from; decides whether it matches a corpus and an encoder."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", allow_inf_nan=False)

    engine: str
    corpus: Fingerprint
    count: int
    dtype: str = "float32"
    """Data type of the indexed embeddings."""
    encoder: str = ""
    """Name of the encoder's folder, for messages only: `probe` is compared. Empty for BM25."""
    pooling: str = ""
    dim: int = 0
    probe: tuple[float, ...] = ()
    """Embedding of `probes.PROBE_TEXT` as a passage; another for another encoder or pooling."""
    factory: str = "Flat"
    """FAISS factory string of the index; unused for BM25."""
    max_length: int | None = None
    """Number of encoded tokens of a passage; None: the model's own limit."""
    query_prefix: str = ""
    passage_prefix: str = ""
    normalizes: bool = True
    created: str = ""
    """UTC time of the build; empty in manifests of early versions."""
    made_with: str = ""
    """Indexing package and its version."""
    analyzer: str = ""
    """Analyzer of a BM25 index (`search_r1.retrieval.tokenization`); empty in early versions."""
    filter_fields: tuple[str, ...] = ()
    """Fields of the corpus by which searches can be limited."""
    files: dict[str, FileFacts] = field(default_factory=dict)
    """The index's other files by name; empty in manifests of earlier versions."""

    def save(self, folder: Path) -> None:
        """Write `manifest.json` into `folder`, with sizes and hashes of the files there."""
        files = [
            path for path in sorted(folder.iterdir()) if path.is_file() and path.name != FILE_NAME
        ]
        facts = {path.name: FileFacts(path.stat().st_size, sha256(path)) for path in files}
        text = TypeAdapter(Manifest).dump_json(replace(self, files=facts), indent=2)
        (folder / FILE_NAME).write_bytes(text + b"\n")

    @classmethod
    def load(cls, folder: Path) -> "Manifest":
        """Read `manifest.json` from `folder`; raises IndexMismatch if it is missing or invalid."""
        path = folder / FILE_NAME
        try:
            return TypeAdapter(cls).validate_json(read_text(path))
        except (OSError, ValueError) as error:
            reason = textwrap.shorten(str(error), 300)
            raise IndexMismatch(
                f"{path} cannot be read ({reason}); expected the manifest that index_builder "
                f"writes: build the index again with `{build_command('<corpus>', '<folder>')}`"
            ) from error

    def check_files(self, folder: Path, *, whole: bool) -> None:
        """Raise IndexMismatch for a file of another size or, with `whole`, other content."""
        if whole and not self.files:
            logger.warning("%s has no hashes of its files: build it again to compare them", folder)
        for name, facts in self.files.items():
            path = folder / name
            try:
                got = f"{path.stat().st_size} bytes"
                if path.stat().st_size == facts.size:
                    got = f"SHA-256 {sha256(path)}" if whole else f"SHA-256 {facts.sha256}"
            except OSError as error:
                got = str(error)
            if got != f"SHA-256 {facts.sha256}":
                raise IndexMismatch(
                    f"{path} is damaged or was changed: got {got}, expected {facts.size} bytes "
                    f"with SHA-256 {facts.sha256}; fix: build or download the index again"
                )

    def check_corpus(self, folder: Path, corpus_path: Path, corpus: Fingerprint) -> None:
        """Raise IndexMismatch unless the index was built from this corpus."""
        if self.corpus != corpus:
            raise IndexMismatch(
                f"index {folder} was built from a corpus of {self.corpus}, but {corpus_path} has "
                f"{corpus}; expected the former: give the corpus it was built from, or build it "
                f"again: `{build_command(str(corpus_path), str(folder.parent), self.engine)}`"
            )


def build_command(corpus: str, save_dir: str, method: str = "bm25") -> str:
    """Return the command line that builds an index, for error messages."""
    model = "" if method == "bm25" else " --model_path <model>"
    return (
        f"python -m search_r1.search.index_builder --retrieval_method {method}"
        f" --corpus_path {corpus} --save_dir {save_dir}{model}"
    )


def open_corpus(config: RetrieverConfig) -> Corpus:
    """Open and check the corpus of the settings; raises SetupError if they name none."""
    if config.corpus_path is None:
        raise SetupError(
            f"--retriever_name {config.retriever_name} without --corpus_path; expected a jsonl "
            "corpus, for example --corpus_path example/corpus.jsonl"
        )
    corpus = Corpus.open(config.corpus_path, whole=config.verify)
    corpus.check_rows(whole=config.verify)
    return corpus


def locate(config: RetrieverConfig, index_name: str) -> Path:
    """Return the index at `index_path` or inside of it; raises SetupError if it is missing."""
    command = build_command(str(config.corpus_path), "<folder>", config.retriever_name)
    if not config.index_path:
        raise SetupError(
            f"--retriever_name {config.retriever_name} without --index_path; fix: `{command}`"
        )
    path = Path(config.index_path)
    inner = path / index_name
    if inner.exists():
        return inner
    if not path.exists():
        raise SetupError(
            f"index {path} does not exist; expected a built index: --index_path, or `{command}`"
        )
    return path
