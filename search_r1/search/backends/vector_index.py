"""What every dense engine checks before it serves: manifest, encoder, corpus and shape.

Loads neither torch nor FAISS. An index is our folder (`vectors.faiss` and a manifest) or a bare
FAISS file such as the published `e5_Flat.index`.
"""

import hashlib
import logging
import threading
from pathlib import Path

from search_r1.search.backends.locations import locate
from search_r1.search.backends.settings import RetrieverConfig
from search_r1.search.corpus import Corpus
from search_r1.search.encoders.interface import Encoder
from search_r1.search.errors import IndexMismatch, SetupError
from search_r1.search.manifest import PROBE_TEXT, Manifest

logger = logging.getLogger(__name__)

VECTORS_NAME = "vectors.faiss"
NUM_SAMPLES = 256
SAMPLE_BYTES = 4096
READ_BYTES = 1 << 24


def locate_index(config: RetrieverConfig) -> Path:
    """The dense index of the settings: our folder or a bare file; raises SetupError without.

    Of a folder around several it is `<name>_Flat.index`, else the only `<name>_*.index`.
    """
    flat = f"{config.retriever_name}_Flat.index"
    around = Path(config.index_path or "")
    found = sorted(path.name for path in around.glob(f"{config.retriever_name}_*.index"))
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


def check_manifest(path: Path, corpus: Corpus, encoder: Encoder) -> None:
    """Raise IndexMismatch unless our folder was built from this corpus and encoder."""
    if path.is_dir():
        manifest = Manifest.load(path)
        manifest.check_corpus(path, corpus.path, corpus.fingerprint)
        manifest.check_probe(path, encoder.name, probe(encoder))


def check_shape(path: Path, rows: int, dim: int, corpus: Corpus, encoder: Encoder) -> None:
    """Raise IndexMismatch unless an index of `rows` × `dim` fits corpus and encoder."""
    if rows != len(corpus):
        raise IndexMismatch(
            f"index {path} holds {rows} vectors, but corpus {corpus.path} has "
            f"{len(corpus)} documents; give the corpus that the index was built from"
        )
    encoded = encoder.encode_queries([PROBE_TEXT]).shape[1]
    if dim != encoded:
        raise IndexMismatch(
            f"index {path} has {dim} dimensions, but encoder {encoder.name} gives {encoded}; "
            "set --retriever_model to the encoder that the index was built with"
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
    thread = threading.Thread(target=_read_through, args=(file,), name="read-ahead", daemon=True)
    thread.start()
    return thread


def _read_through(file: Path) -> None:
    buffer = bytearray(READ_BYTES)
    try:
        with file.open("rb", buffering=0) as data:
            while data.readinto(buffer):
                pass
    except OSError as error:  # whoever needs the file reports it
        logger.info("not read ahead: %s", error)


def index_digest(file: Path) -> str:
    """64-bit BLAKE2b hash (hex) of a file's size and of samples from its first to its last byte.

    Two indexes of one corpus differ in nearly every vector, so samples tell them apart without
    reading 64 GB.
    """
    size = file.stat().st_size
    hasher = hashlib.blake2b(str(size).encode(), digest_size=8)
    last = max(0, size - SAMPLE_BYTES)
    with file.open("rb") as data:
        for i in range(NUM_SAMPLES):
            data.seek(last * i // (NUM_SAMPLES - 1))
            hasher.update(data.read(SAMPLE_BYTES))
    return hasher.hexdigest()
