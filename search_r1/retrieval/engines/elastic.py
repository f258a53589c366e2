"""Elasticsearch and OpenSearch as engines: BM25, nearest vectors, or both, over HTTP.

A document's `_id` is its row. Both servers score an inner product x ≥ 0 as 1 + x, else as
1 / (1 - x).
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx

from search_r1.retrieval.encoders.families import Vectors
from search_r1.retrieval.engines.remote import (
    TOKEN,
    Address,
    Match,
    RemoteRetriever,
    document_of,
    open_remote,
    texts_of,
)
from search_r1.retrieval.errors import CorpusError, SetupError, UpstreamRefused, UpstreamUnavailable
from search_r1.retrieval.schema import Document
from search_r1.retrieval.settings import FaissConfig, RetrieverConfig
from verl.errors import explain, shortened
from verl.ports import is_local_host

MAX_ID_BYTES = 32_766
"""Longest indexed keyword of Lucene."""
MAX_WORDS = 1000
"""Words of a query that are searched; Lucene refuses more than 1,024."""
MAX_HITS = 10_000
CONNECT_S = 5.0
META = "search_r1"
MIN_VERSIONS = {"elastic": (8, 13), "opensearch": (2, 9)}
"""The first with exact search by inner product, and the first whose vectors Lucene holds so."""
CONSTRUCTION = 200


class ElasticCollection:
    """An index of either server; the connections are shared by all threads."""

    ranks_words = True

    def __init__(self, client: httpx.Client, address: Address) -> None:
        """Raises SetupError for another server, or an old one."""
        self._client, self._address = client, address
        self._is_opensearch = address.engine == "opensearch"
        version = self._send("GET", "/")["version"]
        self.made_with = f"{version.get('distribution', 'elasticsearch')} {version['number']}"
        expected = MIN_VERSIONS[address.engine]
        number = tuple(map(int, re.findall(r"\d+", version["number"])[:2]))
        if (version.get("distribution") == "opensearch") != self._is_opensearch:
            fix = "elastic:// is Elasticsearch, opensearch:// is OpenSearch"
            raise SetupError(explain(str(address), self.made_with, address.engine, fix))
        if number < expected:
            fix = "update the server"
            raise SetupError(explain(str(address), self.made_with, f"{expected} or newer", fix))

    def read_description(self) -> str | None:
        found = self._send("GET", f"/{self._address.collection}/_mapping", missing=True)
        if found is None:
            return None
        [index] = found.values()
        return str(index["mappings"].get("_meta", {}).get(META, ""))

    def create(self, description: str, factory: str, dim: int) -> None:
        fields: dict[str, Any] = {
            "row": {"type": "integer"},
            "id": {"type": "keyword"},
            "contents": {"type": "text"},
            "others": {"type": "keyword", "index": False, "doc_values": False},
        }
        if dim:
            fields["vector"] = self._vector_field(factory, dim)
        is_graph = dim > 0 and self._is_opensearch and factory != "Flat"
        body = {
            "settings": {"index": {"knn": True}} if is_graph else {},
            "mappings": {"dynamic": False, "_meta": {META: description}, "properties": fields},
        }
        self._send("PUT", f"/{self._address.collection}", body)

    def check_document(self, document: Document) -> None:
        if len(document.id.encode()) > MAX_ID_BYTES:
            got, expected = f"{len(document.id.encode())} bytes", f"at most {MAX_ID_BYTES}"
            raise CorpusError(explain("id", got, expected, f"shorten {document.id[:80]!r} …"))

    def insert(
        self, first_row: int, documents: Sequence[Document], vectors: Vectors | None
    ) -> None:
        lines: list[Any] = []
        for i, document in enumerate(documents):
            id, contents, others = texts_of(document)
            fields = {"row": first_row + i, "id": id, "contents": contents, "others": others}
            vector = {} if vectors is None else {"vector": vectors[i].tolist()}
            lines += [{"index": {"_id": str(first_row + i)}}, fields | vector]
        answer = self._send("POST", f"/{self._address.collection}/_bulk", lines=lines)
        if answer["errors"]:
            errors = (item["index"].get("error") for item in answer["items"])
            raise self._unavailable(str(next(filter(None, errors), "an insert failed")))

    def delete_from(self, row: int) -> None:
        query = {"query": {"range": {"row": {"gte": row}}}}
        self._send("POST", f"/{self._address.collection}/_delete_by_query?refresh=true", query)

    def store(self) -> None:
        self._send("POST", f"/{self._address.collection}/_flush", {})

    def load(self) -> None:
        self._send("POST", f"/{self._address.collection}/_refresh", {})

    def count(self, below: int | None = None) -> int:
        query: Any = {"match_all": {}} if below is None else {"range": {"row": {"lt": below}}}
        answer = self._send("POST", f"/{self._address.collection}/_count", {"query": query})
        self._check_shards(answer)
        return int(answer["count"])

    def search(
        self, vectors: Vectors, k: int, factory: str, config: FaissConfig
    ) -> list[list[Match]]:
        size = min(k, MAX_HITS)
        effort = max(size, config.ef_search or 100)
        bodies = [self._nearest(vector.tolist(), size, effort, factory) for vector in vectors]
        found = self._search_all([body | {"size": size, "_source": False} for body in bodies])
        return [
            [Match(int(hit["_id"]), inner_product(hit["_score"])) for hit in hits] for hits in found
        ]

    def search_words(self, queries: Sequence[str], k: int) -> list[list[Match]]:
        order = [{"_score": "desc"}, {"row": "asc"}]
        common = {"size": min(k, MAX_HITS), "_source": False, "sort": order}
        texts = (" ".join(query.split()[:MAX_WORDS]) for query in queries)
        bodies = [{"query": {"match": {"contents": text}}, **common} for text in texts]
        return [
            [Match(int(hit["_id"]), hit["_score"]) for hit in hits]
            for hits in self._search_all(bodies)
        ]

    def documents(self, rows: Sequence[int]) -> Mapping[int, Document]:
        if not rows:
            return {}
        path = f"/{self._address.collection}/_mget?_source_excludes=vector"
        answer = self._send("POST", path, {"ids": [str(row) for row in rows]})
        if not all(item.get("found") for item in answer["docs"]):
            raise self._unavailable("a passage is missing")
        return {int(item["_id"]): document_of(item["_source"]) for item in answer["docs"]}

    def find(self, id: str) -> Document | None:
        body = {"query": {"term": {"id": id}}, "size": 1, "_source": {"excludes": ["vector"]}}
        [hits] = self._search_all([body])
        return document_of(hits[0]["_source"]) if hits else None

    def _vector_field(self, factory: str, dim: int) -> dict[str, Any]:
        graph = re.fullmatch(r"HNSW(\d+)", factory)
        if not graph and factory != "Flat":
            expected = f"Flat or HNSW32 for {self._address.engine}"
            raise SetupError(explain("--faiss_type", factory, expected, "name one of them"))
        links = {"m": int(graph[1]), "ef_construction": CONSTRUCTION} if graph else {}
        if self._is_opensearch:
            method = {"name": "hnsw", "engine": "lucene", "space_type": "innerproduct"}
            graph_options = {"method": {**method, "parameters": links}} if graph else {}
            return {"type": "knn_vector", "dimension": dim, **graph_options}
        options = {"type": "hnsw" if graph else "flat", **links}
        field = {"type": "dense_vector", "dims": dim, "index": True, "index_options": options}
        return field | {"similarity": "max_inner_product"}

    def _nearest(self, vector: list[float], k: int, effort: int, factory: str) -> dict[str, Any]:
        """Return the query for the nearest vectors: exact for Flat."""
        if not self._is_opensearch:
            field = {"field": "vector", "query_vector": vector}
            return {"knn": {**field, "k": k, "num_candidates": min(effort, MAX_HITS)}}
        if factory != "Flat":
            return {"query": {"knn": {"vector": {"vector": vector, "k": effort}}}}
        values = {"field": "vector", "query_value": vector, "space_type": "innerproduct"}
        script = {"source": "knn_score", "lang": "knn", "params": values}
        return {"query": {"script_score": {"query": {"match_all": {}}, "script": script}}}

    def _search_all(self, bodies: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
        """Yield the hits of each query, all of which are in one request."""
        lines = [line for body in bodies for line in ({}, body)]
        answer = self._send("POST", f"/{self._address.collection}/_msearch", lines=lines)
        for response in answer["responses"]:
            if "error" in response:
                raise self._unavailable(str(response["error"]))
            self._check_shards(response)
            yield response["hits"]["hits"]

    def _check_shards(self, answer: Mapping[str, Any]) -> None:
        """Raise UpstreamUnavailable if a part of the index was not searched."""
        if answer.get("timed_out") or answer["_shards"]["failed"]:
            raise self._unavailable(f"{answer['_shards']} searched")

    def _send(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        lines: Sequence[Any] = (),
        missing: bool = False,
    ) -> Any:
        """Return the JSON of an answer; None for a 404 if that may be `missing`."""
        content, kind = (b"" if body is None else json.dumps(body).encode()), "application/json"
        if lines:
            content = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
            kind = "application/x-ndjson"
        try:
            headers = {"Content-Type": kind} if content else {}
            response = self._client.request(method, path, content=content, headers=headers)
            answer = response.json()
        except (httpx.HTTPError, ValueError) as error:
            raise self._unavailable(f"{type(error).__name__} {error}") from error
        if missing and response.status_code == 404:
            return None
        if response.is_success:
            return answer
        reason = shortened(f"{response.status_code} {answer}", 300)
        if response.status_code in (408, 429) or response.status_code >= 500:
            raise self._unavailable(reason)
        fix = f"export {TOKEN} as user:password or as API key, or correct the address"
        raise UpstreamRefused(explain(str(self._address), reason, "an answer", fix))

    def _unavailable(self, reason: str) -> UpstreamUnavailable:
        fix = "wait until the server is up, or correct the address"
        got = shortened(reason, 300)
        return UpstreamUnavailable(explain(str(self._address), got, "an answer", fix))


def inner_product(score: float) -> float:
    """Return the inner product that the servers' score stands for."""
    return score - 1 if score >= 1 else 1 - 1 / score


def open_collection(address: Address, token: str | None, timeout: float) -> ElasticCollection:
    """Connect to the server; raises a SearchError with the fix."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", address.collection):
        fix = "lower-case letters, digits and ._-"
        raise SetupError(explain("collection", address.collection, "a name of an index", fix))
    is_pair = token is not None and ":" in token
    headers = {"Authorization": f"ApiKey {token}"} if token and not is_pair else {}
    user, _, password = (token or "").partition(":")
    client = httpx.Client(
        base_url=address.server,
        timeout=httpx.Timeout(timeout, connect=CONNECT_S),
        headers=headers,
        auth=(user, password) if is_pair else None,
        trust_env=not is_local_host(httpx.URL(address.server).host),  # no proxy to itself
    )
    return ElasticCollection(client, address)


def open_retriever(config: RetrieverConfig) -> RemoteRetriever:
    return open_remote(config)
