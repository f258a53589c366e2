"""Elasticsearch and OpenSearch: what is sent and read, against a stand-in after their documents."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from search_r1.retrieval.engines.base import Retriever
from search_r1.retrieval.engines.elastic import inner_product
from search_r1.retrieval.engines.registry import build_retriever
from search_r1.retrieval.errors import SearchError, SetupError, UpstreamRefused, UpstreamUnavailable
from search_r1.retrieval.index_builder import BuildConfig, build_index
from search_r1.retrieval.settings import EncoderConfig, RetrieverConfig
from tests.apps import running
from tests.retrieval.conftest import QUERIES
from tests.retrieval.engines.elastic_wire import Wire

VERSIONS = {
    "elastic": {"number": "8.15.1"},
    "opensearch": {"distribution": "opensearch", "number": "2.17.0"},
}
HASH = EncoderConfig("hash")


@contextlib.contextmanager
def serving(
    engine: str, version: dict[str, str] | None = None, fail: Callable[[str], Any] = lambda _: None
) -> Iterator[tuple[Wire, str]]:
    """Yield a stand-in and the address of an index in it."""
    wire = Wire(version or VERSIONS[engine], fail)
    with running(wire.app) as url:
        yield wire, f"{engine}{url.removeprefix('http')}/cities"


def fill(corpus: Path, uri: str, method: str = "e5", factory: str = "Flat") -> None:
    model = None if method == "bm25" else "hash"
    build_index(
        BuildConfig(method, str(corpus), to=uri, model_path=model, faiss_type=factory, shard_rows=3)
    )


def open_uri(uri: str, encoder: EncoderConfig = HASH) -> Retriever:
    return build_retriever(RetrieverConfig(uri.partition(":")[0], index_path=uri, encoder=encoder))


@pytest.mark.parametrize("engine", VERSIONS)
@pytest.mark.parametrize("factory", ["Flat", "HNSW16"])
def test_vectors_rank_as_exact_search(
    corpus_path: Path, open_engine: Callable[[str], Retriever], engine: str, factory: str
) -> None:
    """Scores are inner products; the index is made with the wanted kind of graph."""
    with serving(engine) as (wire, uri):
        fill(corpus_path, uri, factory=factory)
        found = open_uri(uri).search(QUERIES, 3)
    for ours, exact in zip(found, open_engine("hash").search(QUERIES, 3), strict=True):
        assert [hit.document for hit in ours] == [hit.document for hit in exact]
        assert [h.score for h in ours] == pytest.approx([h.score for h in exact], abs=1e-5)
    assert ("16" in str(wire.mappings["cities"]["properties"]["vector"])) == (factory == "HNSW16")


def test_words_rank_without_an_encoder(corpus_path: Path) -> None:
    """A collection of words alone has no vectors; the same one is resumed, another refused."""
    with serving("elastic") as (wire, uri):
        fill(corpus_path, uri, "bm25")
        del wire.rows["cities"][7]
        fill(corpus_path, uri, "bm25")
        assert "vector" not in wire.rows["cities"][7]
        retriever = open_uri(uri, EncoderConfig())
        [hits, none] = retriever.search(["Seine", "quokka"], 3)
        assert [hit.document.title for hit in hits] == ["Paris"] and none == []
        assert retriever.corpus.find("d5").title == "Zürich"  # type: ignore[attr-defined]
        for change in (lambda: fill(corpus_path, uri), lambda: open_uri(uri)):
            with pytest.raises(SearchError):
                change()


def test_words_and_vectors_are_fused(corpus_path: Path) -> None:
    """`?rank=hybrid`: both rankings count, and it is part of the identity."""
    with serving("opensearch") as (_, uri):
        fill(corpus_path, uri)
        retriever = open_uri(f"{uri}?rank=hybrid")
        [hits] = retriever.search(["capital Danube"], 8)
        assert hits[0].document.title in ("Vienna", "Budapest")
        assert hits[0].score == pytest.approx(2 / 61, abs=2e-3)
        assert retriever.info()["rank"] == "hybrid" != open_uri(uri).info()["rank"]


@pytest.mark.parametrize(
    ("token", "header"), [("ann:pw", "Basic YW5uOnB3"), ("a-key", "ApiKey a-key"), ("", None)]
)
def test_the_token_is_in_the_header_alone(
    monkeypatch: pytest.MonkeyPatch, corpus_path: Path, caplog: pytest.LogCaptureFixture,
    token: str, header: str | None,
) -> None:  # fmt: skip
    """A pair is HTTP's basic authentication, anything else an API key."""
    monkeypatch.setenv("INDEX_TOKEN", token)
    with serving("elastic") as (wire, uri), caplog.at_level("DEBUG"):
        fill(corpus_path, uri)
    assert set(wire.headers) == {header}
    assert not token or token not in caplog.text


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ((503, {"error": "no master"}), UpstreamUnavailable),
        ((429, {"error": "es_rejected_execution_exception"}), UpstreamUnavailable),
        ((401, {"error": "security_exception"}), UpstreamRefused),
        ((200, {"responses": [{"error": {"type": "x"}, "status": 400}]}), UpstreamUnavailable),
        (
            (200, {"responses": [{"timed_out": False, "_shards": {"failed": 1}}]}),
            UpstreamUnavailable,
        ),
    ],
)
def test_no_answer_is_less_than_the_whole(
    corpus_path: Path, answer: tuple[int, Any], error: type[SearchError]
) -> None:
    """A shard that failed fails the search; nobody trains on what the others found."""
    with serving("elastic", fail=lambda path: answer if "_msearch" in path else None) as (_, uri):
        fill(corpus_path, uri)
        with pytest.raises(error):
            open_uri(uri).search(["a"], 3)


@pytest.mark.parametrize(
    ("engine", "version"),
    [
        ("elastic", {"number": "7.17.0"}),
        ("elastic", VERSIONS["opensearch"]),
        ("opensearch", VERSIONS["elastic"]),
        ("opensearch", {"distribution": "opensearch", "number": "1.3.0"}),
    ],
)
def test_another_server_is_refused(engine: str, version: dict[str, str], corpus_path: Path) -> None:
    """Of the other project, or too old."""
    with serving(engine, version) as (_, uri), pytest.raises(SetupError):
        fill(corpus_path, uri)


def test_it_keeps_no_fields_for_filters(corpus_path: Path) -> None:
    """Before anything is made."""
    config = BuildConfig("bm25", str(corpus_path), filter_fields=("contents",))
    with serving("elastic") as (wire, uri):
        with pytest.raises(SetupError, match="--filter_fields"):
            build_index(replace(config, to=uri))
        assert not wire.mappings


@pytest.mark.parametrize("product", [0.0, 0.5, 3.0, -0.5, -7.0])
def test_scores_are_turned_back_into_inner_products(product: float) -> None:
    score = 1 + product if product >= 0 else 1 / (1 - product)
    assert inner_product(score) == pytest.approx(product)
