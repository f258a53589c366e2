"""Addresses of collections, and which of them a retrieval server refuses; with Milvus Lite."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from search_r1.retrieval.engines.base import Retriever
from search_r1.retrieval.engines.registry import build_retriever
from search_r1.retrieval.engines.remote import Address, Match, document_of, fuse, texts_of
from search_r1.retrieval.errors import IndexMismatch, SearchError, SetupError
from search_r1.retrieval.index_builder import BuildConfig, build_index
from search_r1.retrieval.local_server import LocalServer
from search_r1.retrieval.schema import Document
from search_r1.retrieval.settings import EncoderConfig, RetrieverConfig
from tests.retrieval.conftest import QUERIES, TEXTS, write_corpus

HASH = EncoderConfig("hash")


@pytest.fixture(scope="module")
def uri(corpus_path: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A filled collection of Milvus Lite."""
    uri = f"milvus:{tmp_path_factory.mktemp('lite')}/file.db/cities"
    build_index(BuildConfig("e5", str(corpus_path), to=uri, model_path="hash"))
    return uri


@pytest.mark.parametrize(
    ("uri", "engine", "expected"),
    [
        ("milvus://h:19530/wiki", None, ("milvus", "http://h:19530", "wiki")),
        ("milvus+https://h/db/wiki", None, ("milvus", "https://h/db", "wiki")),
        ("https://h/wiki", "milvus", ("milvus", "https://h", "wiki")),
        ("milvus:a/b.db/wiki", None, ("milvus", "a/b.db", "wiki")),
        ("milvus:/a/b.db/wiki", "milvus", ("milvus", "/a/b.db", "wiki")),
    ],
)
def test_an_address_names_engine_server_and_collection(
    uri: str, engine: str | None, expected: tuple[str, str, str]
) -> None:
    """Every form is read, and written again as the one that the builder reads."""
    address = Address.parse("--to", uri, engine)
    assert (address.engine, address.server, address.collection) == expected
    assert Address.parse("--to", address.uri) == address


@pytest.mark.parametrize(
    "uri",
    [None, "", "data/index", "http://h/wiki", "milvus://h:19530", "milvus://h/", "milvus:wiki",
     "mongo://h/wiki", "milvus://ann:pw@h/wiki", "milvus://h/wiki?token=pw"],
)  # fmt: skip
def test_another_address_is_refused(uri: str | None) -> None:
    """So is one with a password, which the message does not repeat."""
    with pytest.raises(SetupError) as caught:
        Address.parse("--to", uri)
    assert "--to" in str(caught.value) and "pw" not in str(caught.value)


def test_a_collection_answers_as_exact_search(
    uri: str, open_engine: Callable[[str], Retriever]
) -> None:
    """Documents, order of equal ones, and scores; one by one as in a batch."""
    exact = open_engine("hash")
    remote = build_retriever(RetrieverConfig("milvus", None, uri, encoder=HASH))
    found = remote.search(QUERIES, 5)
    for query, ours, theirs in zip(QUERIES, found, exact.search(QUERIES, 5), strict=True):
        assert [hit.document for hit in ours] == [hit.document for hit in theirs], query
        assert [h.score for h in ours] == pytest.approx([h.score for h in theirs], abs=1e-6)
        assert remote.search([query], 5)[0] == ours
    assert remote.search([], 3) == [] and len(remote.search(["a"], 100)[0]) == len(TEXTS)


def test_a_server_needs_no_corpus(corpus_path: Path, tmp_path: Path) -> None:
    """Passages, those asked for by id too, come from the engine; its identity has no path."""
    uri = f"milvus:{tmp_path}/file.db/cities"
    fill = ["--retrieval_method", "e5", "--corpus_path", corpus_path, "--model_path", "hash"]
    command = [sys.executable, "-m", "search_r1.search.index_builder", *fill, "--to", uri]
    subprocess.run(command, check=True)  # one process at a time may open the file
    flags = ["--retriever_name", "milvus", "--index_path", uri, "--retriever_model", "hash"]
    with LocalServer(flags) as server:
        body = {"queries": ["capital of France"], "topk": 1}
        found = httpx.post(f"{server.url}/retrieve", json=body).json()["result"][0][0]
        answer = httpx.get(f"{server.url}/document", params={"id": found["id"]})
        assert answer.json()["document"] == found
        assert httpx.get(f"{server.url}/document", params={"id": "no"}).status_code == 404
        info = httpx.get(f"{server.url}/info").json()
    assert info["collection"] == "cities" and info["corpus"]["count"] == len(TEXTS)
    assert str(tmp_path) not in json.dumps(info)


def other_corpus(folder: Path) -> Path:
    return write_corpus(folder / "corpus.jsonl", [*TEXTS[:-1], ("Graz", "A city.")])


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda c, folder: c | {"corpus_path": str(other_corpus(folder))}, IndexMismatch),
        (lambda c, folder: c | {"encoder": EncoderConfig("hash:32")}, IndexMismatch),
        (lambda c, folder: c | {"encoder": EncoderConfig()}, SetupError),
        (lambda c, folder: c | {"index_path": c["index_path"] + "2"}, SetupError),
        (lambda c, folder: c | {"index_path": None}, SetupError),
        (lambda c, folder: c | {"index_path": "milvus://127.0.0.1:9/wiki"}, SearchError),
        (lambda c, folder: c | {"index_path": f"milvus:{folder}/x/wiki"}, SetupError),
    ],
)
def test_what_does_not_fit_is_refused(
    uri: str, tmp_path: Path, change: Callable[..., dict], error: type[SearchError]
) -> None:
    """Another corpus or encoder, no encoder, no collection, no server, no file of Milvus Lite."""
    settings = {"retriever_name": "milvus", "index_path": uri, "encoder": HASH}
    with pytest.raises(error):
        build_retriever(RetrieverConfig(**change(settings, tmp_path)))


def test_its_own_corpus_is_compared(uri: str, corpus_path: Path) -> None:
    """With --verify, every passage."""
    config = RetrieverConfig("milvus", str(corpus_path), uri, verify=True, encoder=HASH)
    assert build_retriever(config).num_documents == len(TEXTS)


@pytest.mark.parametrize(
    "document",
    [
        Document.from_contents("7", '"Graz"\nA city.'),
        Document.from_contents("8", "one line"),
        Document("9", "Title", "another text", "contents\nof their own"),
    ],
)
def test_a_document_comes_back_as_it_was(document: Document) -> None:
    names = ("id", "contents", "others")
    assert document_of(dict(zip(names, texts_of(document), strict=True))) == document


def test_ranks_are_fused_by_their_reciprocals() -> None:
    """By the formula, ties by row; a row of both rankings is before one of either."""
    first, second = [Match(7, 0.9), Match(3, 0.8)], [Match(3, 12.0), Match(9, 11.0), Match(2, 1.0)]
    assert fuse([first, second]) == [
        Match(3, 1 / 62 + 1 / 61), Match(7, 1 / 61), Match(9, 1 / 62), Match(2, 1 / 63),
    ]  # fmt: skip
