"""Milvus as engine: a standalone server, a cluster, a cloud, or a local file of Milvus Lite.

Vectors are compared by inner product, as in FAISS; words, from Milvus 2.5 on, by its BM25, over the
words that `bm25` in a folder has, of any script. Searches do not wait for other writers
(consistency "Eventually"): a collection is not served before all of it is stored and loaded.
"""

import copy
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import grpc
from pymilvus import DataType, Function, FunctionType, MilvusClient, MilvusException
from pymilvus.client.types import LoadState

from search_r1.retrieval.encoders.families import Vectors
from search_r1.retrieval.engines.base import Filter
from search_r1.retrieval.engines.remote import (
    MARGIN,
    TOKEN,
    Address,
    Match,
    RemoteRetriever,
    by_score,
    document_of,
    open_remote,
    texts_of,
)
from search_r1.retrieval.errors import CorpusError, SetupError, UpstreamRefused, UpstreamUnavailable
from search_r1.retrieval.schema import Document
from search_r1.retrieval.settings import FaissConfig, RetrieverConfig
from search_r1.retrieval.tokenization import SCRIPTS, fold, tokenize
from verl.errors import explain, first_line

logger = logging.getLogger(__name__)

MAX_BYTES = 65_535
"""Longest text that Milvus stores."""
MAX_GROWTH = 16
"""Most bytes of words for a folded character: itself and a pair, of four bytes each, and spaces."""
MAX_HITS = 16_384
CONNECT_S = 5.0
WRITE_S = 120.0
"""Seconds for a connection, and for a write of a block."""
ROWS_AT_ONCE = 4096
NO_WORDS = "update Milvus to 2.5 and fill a new collection, or leave words to bm25 in a folder"
FIRST_WITH_WORDS = (2, 5)
WORDS = "tokens"
"""Text field with a document's words, which Milvus' analyzer only takes apart again."""
SPLIT = {"tokenizer": "standard"}
BM25 = {"bm25_k1": 1.5, "bm25_b": 0.75}
"""As `bm25` in a folder."""
MANIFEST = "search_r1.manifest"
"""Property of a collection; Milvus Lite keeps no description."""
STRONG, EVENTUALLY = "Strong", "Eventually"
DEFAULT_NPROBE = 16
FACTORIES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (r"Flat", "FLAT", ()),
    (r"HNSW(\d+)", "HNSW", ("M",)),
    (r"IVF(\d+),Flat", "IVF_FLAT", ("nlist",)),
    (r"IVF(\d+),SQ8", "IVF_SQ8", ("nlist",)),
    (r"IVF(\d+),PQ(\d+)", "IVF_PQ", ("nlist", "m")),
    (r"AUTOINDEX", "AUTOINDEX", ()),
)
"""FAISS factory, Milvus' kind of index, and the parameters that the factory's numbers are."""
CONSTRUCTION = {"HNSW": {"efConstruction": 360}, "IVF_PQ": {"nbits": 8}}
TEXTS = ("id", "contents", "others")
"""Text fields; `others` has title and text as JSON if `contents` does not give them."""


KEYS, MAX_KEYS, MAX_KEY_BYTES = "keys", 1024, 1024
"""Field with a passage's keys for filters, and what it may hold."""


class MilvusCollection:
    """A collection of Milvus; the connection is shared by all threads."""

    def __init__(self, client: MilvusClient, address: Address, timeout: float) -> None:
        self._client, self._address, self._timeout = client, address, timeout
        self._name = address.collection
        with self._errors():
            version = client.get_server_version(timeout=timeout)
        self.made_with = f"milvus {version}"
        self._is_new = tuple(map(int, re.findall(r"\d+", version)[:2])) >= FIRST_WITH_WORDS
        self._keys_of_row: Callable[[int], list[str]] | None = None
        self._limit = ""

    @cached_property
    def ranks_words(self) -> bool:
        """Whether the collection has words; before there is one, whether it would have them."""
        with self._errors():
            if not self._client.has_collection(self._name, timeout=self._timeout):
                return self._is_new
            facts = self._client.describe_collection(self._name, timeout=self._timeout)
        return any(field["name"] == WORDS for field in facts["fields"])

    def read_description(self) -> str | None:
        with self._errors():
            if not self._client.has_collection(self._name, timeout=self._timeout):
                return None
            facts = self._client.describe_collection(self._name, timeout=self._timeout)
        return str(facts["properties"].get(MANIFEST, ""))

    def create(self, description: str, factory: str, dim: int) -> None:
        if not (dim or self._is_new):
            expected = f"vectors in {self.made_with}"
            raise SetupError(explain("index", "words alone", expected, NO_WORDS))
        index = self._client.prepare_index_params()
        schema = MilvusClient.create_schema()
        schema.add_field("row", DataType.INT64, is_primary=True)
        for name in TEXTS:
            schema.add_field(name, DataType.VARCHAR, max_length=MAX_BYTES)
        if self._keys_of_row is not None:
            schema.add_field(KEYS, DataType.ARRAY, element_type=DataType.VARCHAR,
                             max_capacity=MAX_KEYS, max_length=MAX_KEY_BYTES)  # fmt: skip
        if dim:
            kind, parameters = read_factory(factory)
            schema.add_field("vector", DataType.FLOAT_VECTOR, dim=dim)
            index.add_index("vector", index_type=kind, metric_type="IP", params=parameters)
        if self._is_new:
            text = {"enable_analyzer": True, "analyzer_params": SPLIT, "max_length": MAX_BYTES}
            schema.add_field(WORDS, DataType.VARCHAR, **text)
            schema.add_field("bm25", DataType.SPARSE_FLOAT_VECTOR)
            schema.add_function(Function("words", FunctionType.BM25, [WORDS], ["bm25"]))
            index.add_index("bm25", index_type="SPARSE_INVERTED_INDEX", metric_type="BM25",
                            params=BM25)  # fmt: skip
        with self._errors():
            self._client.create_collection(
                self._name, schema=schema, properties={MANIFEST: description}, timeout=WRITE_S
            )
            try:  # now, since Milvus refuses parameters of an index only here
                self._client.create_index(self._name, index, timeout=WRITE_S)
            except MilvusException:
                self._client.drop_collection(self._name, timeout=WRITE_S)
                raise

    def check_document(self, document: Document) -> None:
        texts = dict(zip(TEXTS, texts_of(document), strict=True))
        if self._is_new and len(fold(document.contents)) > MAX_BYTES // MAX_GROWTH:
            [texts[WORDS]] = _words([document.contents])
        for name, text in texts.items():
            if len(text) > MAX_BYTES // 4 and len(text.encode()) > MAX_BYTES:
                got = f"{len(text.encode())} bytes in document {document.id[:80]!r}"
                expected, fix = f"at most {MAX_BYTES}, Milvus' limit", "split it into passages"
                raise CorpusError(explain(name, got, expected, fix))

    def insert(
        self, first_row: int, documents: Sequence[Document], vectors: Vectors | None
    ) -> None:
        rows: list[dict[str, Any]] = [
            {"row": row, **dict(zip(TEXTS, texts_of(document), strict=True))}
            for row, document in enumerate(documents, first_row)
        ]
        for fields, vector in zip(rows, () if vectors is None else vectors, strict=False):
            fields["vector"] = vector
        if self.ranks_words:
            words = _words([document.contents for document in documents])
            for fields, text in zip(rows, words, strict=True):
                fields[WORDS] = text
        if self._keys_of_row is not None:
            for fields in rows:
                fields[KEYS] = self._keys_of_row(fields["row"])
        with self._errors():
            self._client.insert(self._name, rows, timeout=WRITE_S)

    def store_keys(
        self, all_keys: Iterable[list[str]], keys_of_row: Callable[[int], list[str]]
    ) -> None:
        self._keys_of_row = keys_of_row
        for row, keys in enumerate(all_keys):
            longest = max((len(key.encode()) for key in keys), default=0)
            if len(keys) > MAX_KEYS or longest > MAX_KEY_BYTES:
                got = f"{len(keys)} values in row {row + 1}, the longest of {longest} bytes"
                expected = f"at most {MAX_KEYS}, of {MAX_KEY_BYTES} bytes with the field's name"
                fix = "leave out the field that has them"
                raise CorpusError(explain("--filter_fields", got, expected, fix))

    def filtered(self, filter: Filter) -> "MilvusCollection":
        narrowed = copy.copy(self)
        lists = [json.dumps(keys, ensure_ascii=False) for keys in filter]
        narrowed._limit = " and ".join(f"array_contains_any({KEYS}, {keys})" for keys in lists)
        return narrowed

    def delete_from(self, row: int) -> None:
        with self._errors():
            self._client.delete(self._name, filter=f"row >= {row}", timeout=WRITE_S)

    def load(self) -> None:
        with self._errors():
            state = self._client.get_load_state(self._name, timeout=self._timeout)["state"]
            if state != LoadState.Loaded:
                logger.info("loading %s", self._address)
                self._client.load_collection(self._name)

    def store(self) -> None:
        with self._errors():
            self._client.flush(self._name)

    def count(self, below: int | None = None) -> int:
        condition = "" if below is None else f"row < {below}"
        fields, level = ["count(*)"], {"consistency_level": STRONG}
        with self._errors():
            found = self._client.query(
                self._name, condition, fields, timeout=self._timeout, **level
            )
        return int(found[0]["count(*)"])

    def search(
        self, vectors: Vectors, k: int, factory: str, config: FaissConfig
    ) -> list[list[Match]]:
        limit = min(k, MAX_HITS)
        with self._errors():
            found = self._client.search(
                self._name,
                data=vectors,
                anns_field="vector",
                filter=self._limit,
                limit=limit,
                output_fields=["row"],
                search_params={"metric_type": "IP", "params": _effort(factory, limit, config)},
                consistency_level=EVENTUALLY,
                timeout=self._timeout,
            )
        if factory == "Flat" and not self._limit and any(len(hits) < limit for hits in found):
            raise UpstreamUnavailable(f"{self._address} did not search all of its passages")
        return [[Match(hit["row"], float(hit["distance"])) for hit in hits] for hits in found]

    def search_words(self, queries: Sequence[str], k: int) -> list[list[Match]]:
        limit, fields = min(k + MARGIN, MAX_HITS), ["row"]
        texts = _words(queries, of_queries=True)
        asked = [*dict.fromkeys(filter(None, texts))]
        with self._errors():
            found = self._client.search(
                self._name, data=asked, anns_field="bm25", limit=limit, output_fields=fields,
                search_params={"metric_type": "BM25"}, consistency_level=EVENTUALLY,
                filter=self._limit, timeout=self._timeout,
            ) if asked else []  # fmt: skip
        # Milvus Lite gives the scores as distances, below zero.
        matches = {
            text: sorted((Match(hit["row"], abs(hit["distance"])) for hit in hits), key=by_score)
            for text, hits in zip(asked, found, strict=True)
        }
        return [matches.get(text, [])[:k] for text in texts]

    def documents(self, rows: Sequence[int]) -> Mapping[int, Document]:
        found: dict[int, Document] = {}
        for start in range(0, len(rows), ROWS_AT_ONCE):
            ids = [int(row) for row in rows[start : start + ROWS_AT_ONCE]]
            found |= {item["row"]: document_of(item) for item in self._query(f"row in {ids}")}
        if len(found) < len(rows):
            missing = f"{len(rows) - len(found)} of {len(rows)} passages"
            raise UpstreamUnavailable(f"{self._address} did not return {missing}")
        return found

    def find(self, id: str) -> Document | None:
        found = self._query(f"id == {json.dumps(id, ensure_ascii=False)}")
        return document_of(found[0]) if found else None

    def _query(self, condition: str) -> list[dict[str, Any]]:
        fields, level = ["row", *TEXTS], {"consistency_level": EVENTUALLY}
        with self._errors():
            return list(
                self._client.query(self._name, condition, fields, timeout=self._timeout, **level)
            )

    def _errors(self) -> Any:
        return translated(self._address)


def read_factory(factory: str) -> tuple[str, dict[str, int]]:
    """Return Milvus' kind of index and its parameters; raises SetupError if it has none."""
    for pattern, kind, names in FACTORIES:
        if found := re.fullmatch(pattern, factory):
            numbers = dict(zip(names, map(int, found.groups()), strict=True))
            return kind, numbers | CONSTRUCTION.get(kind, {})
    expected = "Flat, HNSW64, IVF4096,Flat, IVF4096,SQ8, IVF4096,PQ64 or AUTOINDEX"
    raise SetupError(explain("--faiss_type", factory, f"{expected} for Milvus", "name one of them"))


@contextmanager
def translated(address: Address) -> Iterator[None]:
    """Turn Milvus' errors into an UpstreamRefused for a wrong token, else UpstreamUnavailable."""
    try:
        yield
    except (MilvusException, grpc.RpcError) as error:
        said = error.message if isinstance(error, MilvusException) else error.details()
        reason = first_line(said or error)
        if "auth" in reason.lower() or "permission" in reason.lower():
            fix = f"export {TOKEN}=user:password, or the token of a cloud"
            expected = "a valid token"
            raise UpstreamRefused(explain(str(address), reason, expected, fix)) from error
        # Its client says the same of a server that is down and of one that refuses the token.
        fix = f"wait until the server is up, correct the address, or export {TOKEN}=user:password"
        raise UpstreamUnavailable(explain(str(address), reason, "an answer", fix)) from error


def open_collection(address: Address, token: str | None, timeout: float) -> MilvusCollection:
    """Connect to the server; raises a SearchError with the fix."""
    if "://" not in address.server and not address.server.endswith(".db"):
        fix = "milvus:folder/file.db/collection"
        raise SetupError(explain("address", address.server, "a file that ends in .db", fix))
    logging.getLogger("pymilvus").setLevel(logging.CRITICAL)  # it logs what it raises, too
    with translated(address):
        client = MilvusClient(address.server, token=token or "", timeout=CONNECT_S)
    return MilvusCollection(client, address, timeout)


def open_retriever(config: RetrieverConfig) -> RemoteRetriever:
    return open_remote(config)


def _words(texts: Sequence[str], *, of_queries: bool = False) -> list[str]:
    """Return the words of each text, as `bm25` in a folder has them, between spaces."""
    return [" ".join(words) for words in tokenize(texts, SCRIPTS, of_queries=of_queries)]


def _effort(factory: str, limit: int, config: FaissConfig) -> dict[str, int]:
    """Return how thoroughly an approximate index is searched."""
    if factory.startswith("HNSW"):
        return {"ef": max(config.ef_search or 0, limit, 64)}
    return {"nprobe": config.nprobe or DEFAULT_NPROBE} if factory.startswith("IVF") else {}
