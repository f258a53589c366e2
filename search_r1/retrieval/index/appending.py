"""Adds passages to a corpus and its indexes: `search-r1 index append`.

A dense index gets the vectors of the new passages only. BM25 is built again, since every score
depends on all passages. The corpus is replaced last; until then each index says which of the two
corpora it was built from, so that the same command continues after an interruption.
"""

import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from search_r1.retrieval.corpus import OFFSETS, Corpus
from search_r1.retrieval.errors import CorpusError, SearchError, SetupError
from search_r1.retrieval.fields import json_row
from search_r1.retrieval.index import build_folder
from search_r1.retrieval.index_builder import AppendConfig, BuildConfig, import_builder
from search_r1.retrieval.manifest import FILE_NAME, Manifest
from search_r1.retrieval.tokenization import FOLDED, SCRIPTS
from verl.errors import explain
from verl.files import exclusive_lock, fsync

logger = logging.getLogger(__name__)


def run(config: AppendConfig) -> int:
    """Add the passages. Raises CorpusError, SetupError or IndexMismatch before anything changes."""
    path = Path(config.corpus_path)
    indexes = find_indexes(Path(config.save_dir))
    Corpus.open(path)  # before a lock is made beside it
    lock = path.with_name(f".{path.name}.lock")
    with exclusive_lock(path.parent, "--corpus_path", lock=lock):
        old, new = Corpus.open(path), Corpus.open(config.passages)
        check_passages(old, new)
        joined = _join(old, new)
        try:
            _append_all(config, indexes, old, joined)
        except SearchError:
            joined.path.unlink()
            raise
        finally:
            joined.path.with_name(joined.path.name + OFFSETS).unlink(missing_ok=True)
        joined.path.replace(path)
        fsync(path.parent)
    lock.unlink(missing_ok=True)
    Corpus.open(path)  # stores its offsets
    logger.info("%s: %d passages, %d of them new", path, len(old) + len(new), len(new))
    return 0


def find_indexes(folder: Path) -> list[Path]:
    """Return the indexes in a folder, or the folder if it is one. Raises SetupError for none."""
    found = sorted(path.parent for path in [folder / FILE_NAME, *folder.glob(f"*/{FILE_NAME}")]
                   if path.is_file())  # fmt: skip
    if not found:
        expected = "the folder of indexes that search-r1 index built"
        raise SetupError(explain("--save_dir", folder, expected, "build one: search-r1 index"))
    return found


def check_passages(old: Corpus, new: Corpus) -> None:
    """Raise CorpusError for a malformed row, or an id that the corpus has."""
    new.check_rows(whole=True)
    for row, document in enumerate(new):
        if old.find(document.id) is not None:
            where = f"{new.path} row {row + 1}"
            expected = f"ids that {old.path} does not have"
            fix = "rename it, or drop what was added before"
            raise CorpusError(explain(where, f"the id {document.id!r}", expected, fix))


def _join(old: Corpus, new: Corpus) -> Corpus:
    """Write both corpora beside the old one, which is copied as it is."""
    target = old.path.with_name(f".{old.path.name}.appending")
    build_folder.check_disk(target.parent, old.fingerprint.size + new.fingerprint.size, "corpus")
    with target.open("wb") as file:
        with old.path.open("rb") as source:
            shutil.copyfileobj(source, file)
            source.seek(-1, 2)
            file.write(b"" if source.read() == b"\n" else b"\n")
        for row, document in enumerate(new):
            fields = json_row(new.line(row)) | document.to_row()  # those of filters, too
            file.write(json.dumps(fields, ensure_ascii=False).encode() + b"\n")
    fsync(target)
    return Corpus.open(target)


def _append_all(config: AppendConfig, indexes: Sequence[Path], old: Corpus, joined: Corpus) -> None:
    """Bring all indexes to the joined corpus, once all are known to fit."""
    left = []
    for index in indexes:
        manifest = Manifest.load(index)
        if manifest.corpus == joined.fingerprint:  # an earlier run was killed behind it
            continue
        manifest.check_corpus(index, old.path, old.fingerprint)
        left.append((index, manifest))
        if manifest.engine != "bm25":
            build = _build_config(config, manifest, joined, index)
            import_builder(manifest.engine).open_own_encoder(build, manifest, index)
    for index, manifest in left:
        _append(_build_config(config, manifest, joined, index), manifest, joined, len(old), index)


def _append(
    build: BuildConfig, manifest: Manifest, corpus: Corpus, num_old: int, index: Path
) -> None:
    """Bring one index to the joined corpus."""
    builder = import_builder(manifest.engine)
    if manifest.engine == "bm25":
        builder.build(build, corpus, index)
    else:
        builder.append(build, manifest, corpus, num_old, index)


def _build_config(
    config: AppendConfig, manifest: Manifest, corpus: Corpus, index: Path
) -> BuildConfig:
    """Return how the index was built, over the joined corpus; an old analyzer becomes ours."""
    analyzers: dict[str, Literal["folded", "scripts"]] = {FOLDED: "folded", SCRIPTS: "scripts"}
    return BuildConfig(
        manifest.engine, str(corpus.path), str(index.parent), config.model_path,
        use_fp16=config.use_fp16, max_length=manifest.max_length, batch_size=config.batch_size,
        pooling_method=config.pooling_method, encoder_family=config.encoder_family,
        trust_remote_code=config.trust_remote_code, filter_fields=manifest.filter_fields,
        analyzer=analyzers.get(manifest.analyzer),
    )  # fmt: skip
