"""Fills a collection of a distributed engine: `search-r1 index --to URI`, resumable.

Rows are inserted in order, so that the engine itself says how far a fill that was killed has come:
up to the last block of which it has every row. Later rows are removed and inserted again.
"""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter

from search_r1.retrieval.corpus import Corpus
from search_r1.retrieval.encoder import Encoder, open_encoder
from search_r1.retrieval.encoders.families import Vectors
from search_r1.retrieval.encoders.prefixes import check_prefixes
from search_r1.retrieval.engines.flat_file import check_finite
from search_r1.retrieval.engines.remote import (
    Address,
    Collection,
    FilteringCollection,
    connect,
    read_manifest,
)
from search_r1.retrieval.errors import IndexMismatch, SetupError
from search_r1.retrieval.fields import keys_of, read_keys
from search_r1.retrieval.index.build_folder import utc_now
from search_r1.retrieval.index.embeddings import fresh_cuts, report_cuts
from search_r1.retrieval.index.encoding import encoder_settings, load_embeddings, manifest_of
from search_r1.retrieval.index.progress import progress
from search_r1.retrieval.index_builder import BuildConfig
from search_r1.retrieval.manifest import Manifest
from search_r1.retrieval.probes import check_probe
from verl.errors import explain

logger = logging.getLogger(__name__)

TIMEOUT_S = 60.0
"""Seconds for a response of the engine, which is busy with our inserts."""
ANALYZER = "standard"
"""Of the engines' text fields."""
IDENTITY = ("corpus", "dim", "pooling", "max_length", "factory", "filter_fields")
"""Facts of a manifest, beside the embedding of the probe text, that a resumed fill must share."""
UNUSED = ("devices", "faiss_gpu", "save_embedding")
"""Options of an index in a folder."""
Encode = Callable[[range], Vectors]


def fill(config: BuildConfig, corpus: Corpus) -> None:
    """Fill the collection of `--to`, or finish what was begun; raises SearchErrors."""
    address = Address.parse("--to", config.to)
    if unused := [f"--{name}" for name in UNUSED if getattr(config, name)]:
        got = f"{' '.join(unused)} with --to"
        fix = "leave it out; several devices encode into a folder, and --embedding_path reads that"
        raise SetupError(explain("index", got, "an index in a folder", fix))
    is_dense = config.retrieval_method != "bm25"
    settings = encoder_settings(config)[0] if is_dense else None
    collection = connect(address, TIMEOUT_S)
    if config.filter_fields:
        if not isinstance(collection, FilteringCollection):
            expected, fix = "milvus, or an index in a folder", "leave it out"
            raise SetupError(explain("--filter_fields", address.engine, expected, fix))
        all_keys = read_keys(corpus, config.filter_fields)
        collection.store_keys(all_keys, partial(keys_of, corpus, config.filter_fields))
    cuts, encode = None, None
    if settings is not None:
        encoder = open_encoder(settings, config.max_length)
        check_prefixes(encoder, settings)
        manifest = manifest_of(config, corpus, encoder, collection.made_with)
        encode = _encoder_of(config, corpus, encoder)
        cuts = fresh_cuts(encoder)
    else:
        manifest = Manifest(
            "bm25", corpus.fingerprint, len(corpus), analyzer=ANALYZER, created=utc_now(),
            made_with=collection.made_with, filter_fields=config.filter_fields,
        )  # fmt: skip
    first = _begin(address, collection, manifest, corpus, config.shard_rows)
    _insert(collection, corpus, encode, first, config.shard_rows)
    _finish(address, collection, len(corpus))
    if cuts is not None:
        report_cuts(cuts)


def _begin(
    address: Address, collection: Collection, manifest: Manifest, corpus: Corpus, block: int
) -> int:
    """Create the collection, or continue one of equal identity; return the first missing row."""
    stored = read_manifest(address, collection)
    if stored is None:
        corpus.check_rows(whole=True)  # before encoding, which can take hours
        for document in corpus:
            collection.check_document(document)
        text = TypeAdapter(Manifest).dump_json(manifest).decode()
        collection.create(text, manifest.factory, manifest.dim)
        return 0
    _check_identity(address, stored, manifest)
    collection.load()
    first = _num_complete(collection, len(corpus), block)
    if first < len(corpus) or collection.count() > first:
        logger.info("%s has the first %d of %d passages", address, first, len(corpus))
        collection.delete_from(first)
    return first


def _check_identity(address: Address, stored: Manifest, manifest: Manifest) -> None:
    """Raise IndexMismatch if the collection was filled from something else: it is never emptied."""
    old, new = asdict(stored), asdict(manifest)
    if differing := [name for name in IDENTITY if old[name] != new[name]]:
        got = ", ".join(f"{name} {old[name]!r}" for name in differing)
        expected = ", ".join(f"{name} {new[name]!r}" for name in differing)
        fix = "name another collection, or drop this one"
        raise IndexMismatch(explain(str(address), got, expected, fix))
    if manifest.dim:
        check_probe(stored, str(address), manifest.encoder, manifest.probe)


def _num_complete(collection: Collection, num_rows: int, block: int) -> int:
    """Return the number of rows in the blocks, from the first, of which none is missing."""
    first = min(collection.count(), num_rows)
    while first:
        if collection.count(first) == first:
            return first if first == num_rows else first // block * block
        first = (first - 1) // block * block
    return 0


def _encoder_of(config: BuildConfig, corpus: Corpus, encoder: Encoder) -> Encode:
    """Return what gives the vectors of rows: the encoder, or the file of --embedding_path."""
    if config.embedding_path is None:
        return lambda rows: encoder.encode_passages([d.contents for d in corpus.documents(rows)])
    dim = encoder.encode_passages(["a"]).shape[1]
    matrix = load_embeddings(Path(config.embedding_path), corpus, encoder, dim)
    return lambda rows: np.asarray(matrix[rows.start : rows.stop], dtype=np.float32)


def _insert(
    collection: Collection, corpus: Corpus, encode: Encode | None, first: int, block: int
) -> None:
    """Encode and insert all rows from `first`; a block is sent while the next is encoded."""
    sent: Future[None] | None = None
    source = Path(f"the embeddings of {corpus.path.name}")
    with (
        progress("fill", "passages", len(corpus), first) as report,
        ThreadPoolExecutor(1) as sender,
    ):
        for rows in _blocks(first, len(corpus), block):
            vectors = None if encode is None else encode(rows)
            if vectors is not None:
                check_finite(source, rows.start, vectors)
            if sent is not None:
                sent.result()
                report(rows.start)
            sent = sender.submit(collection.insert, rows.start, corpus.documents(rows), vectors)
        if sent is not None:
            sent.result()
            report(len(corpus))


def _blocks(first: int, end: int, block: int) -> Iterator[range]:
    for start in range(first, end, block):
        yield range(start, min(start + block, end))


def _finish(address: Address, collection: Collection, num_rows: int) -> None:
    """Load the collection and compare its number of rows; raises IndexMismatch."""
    collection.store()
    collection.load()
    if (count := collection.count()) != num_rows:
        got, expected = f"{count} passages at the end", f"{num_rows}, as in the corpus"
        fix = "run the same command again, alone: it repairs the collection"
        raise IndexMismatch(explain(str(address), got, expected, fix))
    logger.info("%s holds all %d passages", address, num_rows)
