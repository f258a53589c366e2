"""Search in a collection of a distributed engine, which `search-r1 index --to URI` has filled.

Vectors rank, or words (BM25), or both, fused by reciprocal ranks: `?rank=` of the address.

The engine stores vectors and passages, so that a retrieval server needs neither index nor corpus.
Passages are numbered by their row in the corpus. A collection is described by the manifest of what
it was filled from. An engine is one file beside this one with `open_collection`.
"""

import copy
import importlib
import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, runtime_checkable
from urllib.parse import urlsplit

from pydantic import TypeAdapter

from search_r1.bearer import read_token
from search_r1.retrieval.corpus import Corpus, sample_indices
from search_r1.retrieval.encoder import Encoder, cuts_of, open_encoder
from search_r1.retrieval.encoders.families import Vectors
from search_r1.retrieval.encoders.prefixes import check_prefixes, recognised
from search_r1.retrieval.engines.base import Filter, Retriever, stage
from search_r1.retrieval.engines.dense import encode_queries, probe
from search_r1.retrieval.engines.fusion import joined, reciprocal
from search_r1.retrieval.errors import IndexMismatch, SetupError, install_command
from search_r1.retrieval.manifest import Manifest, open_corpus
from search_r1.retrieval.probes import check_probe
from search_r1.retrieval.schema import Document, Hit, fingerprint
from search_r1.retrieval.settings import FaissConfig, RetrieverConfig
from verl.errors import explain, redact

TOKEN = "INDEX_TOKEN"
"""Environment variable with the token of the engine, or with `user:password`."""
ENGINES = {"milvus": "milvus", "elastic": "elastic", "opensearch": "elastic"}
"""Module of each engine; an engine is the scheme of its addresses."""
FORM = (
    "milvus://host:19530/collection, milvus+https://host/collection, milvus:file.db/collection, "
    "elastic://host:9200/index or opensearch+https://host/index?rank=hybrid"
)
VECTORS, WORDS, HYBRID = RANKS = ("vectors", "words", "hybrid")
NUM_FUSED = 50
"""Least number of hits of each ranking that are fused."""
MARGIN = 32
"""Hits to ask for beyond k, so that passages with equal scores are ordered by row."""
BLOCK = 1024
"""Passages that are read at a time."""


@dataclass(frozen=True)
class Address:
    """Where a collection is."""

    engine: str
    server: str
    """Address of the server (http or https), or the file of a local one."""
    collection: str
    rank: str = ""
    """What ranks; empty: vectors if there is an encoder, else words."""

    def __str__(self) -> str:
        return f"{self.engine} collection {self.collection} at {self.server}"

    @property
    def uri(self) -> str:
        """The address in the form that `parse` reads."""
        server = re.sub("^http(?=s?:)", f"{self.engine}+http", self.server)
        head = f"{self.engine}:{server}" if server == self.server else server
        rank = f"?rank={self.rank}" if self.rank else ""
        return f"{head.replace('+http:', ':')}/{self.collection}{rank}"

    @classmethod
    def parse(cls, option: str, uri: str | None, engine: str | None = None) -> "Address":
        """Read `engine://host:port/collection`; of a known `engine`, also http(s)://.

        Raises SetupError, for credentials too: addresses are logged.
        """
        parts = urlsplit(uri or "")
        name, _, scheme = parts.scheme.partition("+")
        if engine and name in ("http", "https"):
            name, scheme = engine, name
        path, _, collection = parts.path.rpartition("/")
        is_known = name in ENGINES and name in (engine, None if engine else name)
        is_local = not parts.netloc and path != "" and not scheme
        rank = parts.query.removeprefix("rank=")
        is_rank = not parts.query or (rank in RANKS and rank != parts.query)
        if not (is_known and collection and (parts.netloc or is_local) and is_rank):
            fix = f"name engine, server and collection: {FORM}"
            raise SetupError(explain(option, redact(uri or "nothing"), "an address", fix))
        if "@" in parts.netloc:
            fix = f"leave them out of the address: export {TOKEN}=user:password"
            raise SetupError(explain(option, f"credentials in {redact(str(uri))}", "none", fix))
        server = path if is_local else f"{scheme or 'http'}://{parts.netloc}{path}"
        return cls(name, server, collection, rank)


@dataclass(frozen=True)
class Match:
    """A row that was found, and its score."""

    row: int
    score: float


class Collection(Protocol):
    """A collection of an engine; its methods raise SearchErrors and may be called by threads."""

    made_with: str
    """Name and version of the engine."""
    ranks_words: bool

    def read_description(self) -> str | None:
        """Return the text it was created with; None if there is no such collection."""

    def create(self, description: str, factory: str, dim: int) -> None:
        """Create it with the index that `factory` (FAISS's words) names; without vectors if 0."""

    def check_document(self, document: Document) -> None:
        """Raise CorpusError for a document that the engine cannot hold."""

    def insert(
        self, first_row: int, documents: Sequence[Document], vectors: Vectors | None
    ) -> None:
        """Add documents with consecutive row numbers."""

    def delete_from(self, row: int) -> None:
        """Remove this row and all later ones; the collection was loaded before."""

    def store(self) -> None:
        """Wait until all that was inserted is on the engine's disks."""

    def load(self) -> None:
        """Prepare it for counts and searches, when its index is complete."""

    def count(self, below: int | None = None) -> int:
        """Return the number of rows, or of those `below` a number, of a loaded collection."""

    def search(
        self, vectors: Vectors, k: int, factory: str, config: FaissConfig
    ) -> list[list[Match]]:
        """Return the best `k` rows for each query by inner product."""

    def search_words(self, queries: Sequence[str], k: int) -> list[list[Match]]:
        """Return the best `k` rows for each query by BM25."""

    def documents(self, rows: Sequence[int]) -> Mapping[int, Document]:
        """Return the documents of different rows; raises UpstreamUnavailable if one is missing."""

    def find(self, id: str) -> Document | None:
        """Return a document with this id, or None."""


@runtime_checkable
class FilteringCollection(Collection, Protocol):
    """A collection whose searches can be limited to passages with keys (`fields.key`)."""

    def store_keys(
        self, all_keys: Iterable[list[str]], keys_of_row: Callable[[int], list[str]]
    ) -> None:
        """Store its keys with each passage that is inserted; raises CorpusError for too long ones.

        Called before `create`. `all_keys` has those of all rows in order, read for this check.
        """

    def filtered(self, filter: Filter) -> Collection:
        """Return the collection with searches that find only what the filter leaves."""


class RemoteRetriever:
    """Ranking in a collection; an engine searches while the next batch encodes."""

    num_threads = 4

    def __init__(
        self, address: Address, collection: Collection, manifest: Manifest,
        encoder: Encoder | None, config: FaissConfig,
    ) -> None:  # fmt: skip
        """Without an encoder, words rank."""
        self.name, self.num_documents = address.engine, manifest.count
        self.corpus = self._collection = collection
        self.cuts = () if encoder is None else cuts_of(encoder)
        self._address, self._manifest, self._config = address, manifest, config
        self._encoder, self._encoding = encoder, threading.Lock()  # tokenizers bear one thread
        self.filter_fields = manifest.filter_fields

    def filtered(self, filter: Filter) -> Retriever:
        assert isinstance(self._collection, FilteringCollection), "only these have fields"
        narrowed = copy.copy(self)
        narrowed._collection = self._collection.filtered(filter)
        return narrowed

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        if not queries:
            return []
        k = min(k, self.num_documents)
        best = [matches[:k] for matches in self._rank(queries, k)]
        with stage("documents"):
            rows = sorted({match.row for matches in best for match in matches})
            documents = self._collection.documents(rows)
            return [[Hit(documents[m.row], m.score) for m in matches] for matches in best]

    def _rank(self, queries: Sequence[str], k: int) -> list[list[Match]]:
        """Return at least `k` rows for each query, if it has as many, best first."""
        is_hybrid = self._address.rank == HYBRID
        rankings = []
        if self._encoder is not None:
            rankings.append(self._nearest(self._encoder, queries, max(k, is_hybrid * NUM_FUSED)))
        if self._encoder is None or is_hybrid:
            with stage("words"):
                limit = max(k, is_hybrid * NUM_FUSED)
                rankings.append(self._collection.search_words(queries, limit))
        if not is_hybrid:
            return rankings[0]
        return [fuse(lists) for lists in zip(*rankings, strict=True)]

    def _nearest(self, encoder: Encoder, queries: Sequence[str], k: int) -> list[list[Match]]:
        with stage("encode"), self._encoding:
            vectors = encode_queries(encoder, queries)
        with stage("search"):
            limit, factory = min(k + MARGIN, self.num_documents), self._manifest.factory
            found = self._collection.search(vectors, limit, factory, self._config)
            return [sorted(matches, key=by_score)[:k] for matches in found]

    def info(self) -> dict[str, Any]:
        """Return the collection's name and what it was filled from; an address is no result."""
        facts = asdict(self._manifest)
        del facts["created"], facts["made_with"], facts["filter_fields"]
        return {
            "engine": self.name,
            "collection": self._address.collection,
            "rank": self._address.rank,
            "dim": self._manifest.dim,
            "factory": self._manifest.factory,
            "ef_search": self._config.ef_search,
            "nprobe": self._config.nprobe,
            "index": fingerprint(facts),
            "encoder": None if self._encoder is None else self._encoder.info(),
            "corpus": asdict(self._manifest.corpus),
        }


def open_remote(config: RetrieverConfig) -> RemoteRetriever:
    """Open the collection of --index_path; raises IndexMismatch if it does not fit the settings."""
    address = Address.parse("--index_path", config.index_path, config.retriever_name)
    model, is_chosen = config.encoder.retriever_model, bool(address.rank)
    address = replace(address, rank=address.rank or (VECTORS if model else WORDS))
    if bool(model) == (address.rank == WORDS):
        got, expected = f"{model or 'nothing'} for {address.rank}", "an encoder unless words rank"
        fix = "--retriever_model intfloat/e5-base-v2, or ?rank=words behind the address"
        raise SetupError(explain("--retriever_model", got, expected, fix))
    collection = connect(address, config.online.online_timeout)
    if address.rank != VECTORS and not collection.ranks_words:
        fix = "--retriever_model and no other ?rank=, or another engine"
        raise SetupError(explain("--index_path", f"{address.rank} in {address}", VECTORS, fix))
    manifest = read_manifest(address, collection)
    if manifest is None:
        raise SetupError(explain("--index_path", f"no {address}", "a filled one", _refill(address)))
    if manifest.dim and not (model or is_chosen):
        got, fix = f"nothing for {address}", f"--retriever_model {manifest.encoder}, or ?rank=words"
        raise SetupError(explain("--retriever_model", got, "the encoder of its vectors", fix))
    encoder = None
    if model:
        settings = recognised(config.encoder, manifest.engine, manifest)
        encoder = open_encoder(settings)
        check_prefixes(encoder, settings, manifest, str(address))
        check_probe(manifest, str(address), encoder.name, probe(encoder))
    collection.load()
    if (count := collection.count()) != manifest.count:
        got, expected = f"{address} with {count} passages", f"{manifest.count}, as in its corpus"
        fix = f"finish it: {_refill(address)}" if count < manifest.count else "drop and refill it"
        raise IndexMismatch(explain("--index_path", got, expected, fix))
    if config.corpus_path is not None:
        _check_corpus(address, collection, manifest, config)
    return RemoteRetriever(address, collection, manifest, encoder, config.faiss)


def connect(address: Address, timeout: float) -> Collection:
    """Return a connection that waits `timeout` seconds for a response; raises a SearchError."""
    try:
        module = importlib.import_module(f"search_r1.retrieval.engines.{ENGINES[address.engine]}")
    except ImportError as error:
        fix = f"install it: {install_command(address.engine)}"
        raise SetupError(f"{error}, which {address.engine} needs; {fix}") from error
    collection: Collection = module.open_collection(address, read_token(TOKEN), timeout)
    return collection


def read_manifest(address: Address, collection: Collection) -> Manifest | None:
    """Return what a collection was filled from, None if it does not exist.

    Raises IndexMismatch for a collection of other programs.
    """
    text = collection.read_description()
    try:
        return None if text is None else TypeAdapter(Manifest).validate_json(text)
    except ValueError as error:
        expected = "one that search-r1 index --to has filled"
        got = f"{address}, which another program made"
        raise IndexMismatch(explain("collection", got, expected, "name another one")) from error


def fuse(rankings: Sequence[Sequence[Match]]) -> list[Match]:
    """Return all rows by the sum of their reciprocal ranks, ties by row."""
    found = (([match.row for match in r], reciprocal(len(r))) for r in rankings)
    return [Match(row, score) for row, score in joined(found)]


def texts_of(document: Document) -> tuple[str, str, str]:
    """Return id, contents, and title and text as JSON if the contents do not give them."""
    is_split_alike = "title" not in document.to_row()
    others = "" if is_split_alike else json.dumps([document.title, document.text])
    return document.id, document.contents, others


def document_of(fields: Mapping[str, Any]) -> Document:
    """Return the document with the texts `id`, `contents` and `others`."""
    if not fields["others"]:
        return Document.from_contents(fields["id"], fields["contents"])
    title, text = json.loads(fields["others"])
    return Document(fields["id"], title, text, fields["contents"])


def by_score(match: Match) -> tuple[float, int]:
    """Order matches by score, equal ones by row."""
    return -match.score, match.row


def _check_corpus(
    address: Address, collection: Collection, manifest: Manifest, config: RetrieverConfig
) -> None:
    """Raise IndexMismatch unless the collection holds this corpus: a sample, or all to verify."""
    corpus: Corpus = open_corpus(config)
    if manifest.corpus != corpus.fingerprint:
        got = f"{address}, filled from a corpus of {manifest.corpus}"
        expected = f"{corpus.path}: {corpus.fingerprint}"
        fix = "give the corpus it was filled from, or none"
        raise IndexMismatch(explain("--index_path", got, expected, fix))
    rows = sample_indices(len(corpus), whole=config.verify)
    for start in range(0, len(rows), BLOCK):
        block = list(rows[start : start + BLOCK])
        stored = collection.documents(block)
        for row, document in zip(block, corpus.documents(block), strict=True):
            if stored[row] != document:
                got = f"another passage in row {row} of {address}"
                fix = "drop and refill it"
                raise IndexMismatch(explain("--index_path", got, f"that of {corpus.path}", fix))


def _refill(address: Address) -> str:
    return f"search-r1 index --to {address.uri} …"
