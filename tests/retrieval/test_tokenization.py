"""BM25's words: spellings of a name are folded alike in documents and queries."""

import json
import re
import unicodedata
from pathlib import Path

import bm25s
import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_r1.retrieval.corpus import Corpus
from search_r1.retrieval.engines.bm25 import Bm25Retriever
from search_r1.retrieval.errors import IndexMismatch
from search_r1.retrieval.index_builder import BuildConfig, build_index
from search_r1.retrieval.manifest import Manifest
from search_r1.retrieval.settings import RetrieverConfig
from search_r1.retrieval.tokenization import FOLDED, UNFOLDED, fold, tokenize

SPELLINGS = [
    ("Bogot\u00e1", "Bogota"), ("Bogota\u0301", "bogot\u00e1"), ("\uff21\uff22\uff11", "ab1"),
    ("\ufb01nal", "final"), ("Stra\u00dfe", "STRASSE"), ("\u0130zmir", "izmir"),
    ("\u0131zmir", "Izmir"), ("\u0141\u00f3d\u017a", "Lodz"), ("\u00d8resund", "oresund"),
    ("\u00c5ngstr\u00f6m", "angstrom"), ("co\u00adop", "coop"), ("Par\u200bis", "Paris"),
    ("Hawai\u02bbi", "Hawai'i"), ("O\u2019Brien", "O'Brien"), ("Nguy\u1ec5n", "nguyen"),
    ("\u039f\u0394\u038e\u03a3", "\u03bf\u03b4\u03c5\u03c2"), ("\u01c4ep", "dzep"),
    ("S\u00e3o\u00a0Tom\u00e9", "sao tome"), ("\u00c6on", "aeon"), ("\u33a1er", "m2er"),
]  # fmt: skip


@pytest.mark.parametrize(("first", "second"), SPELLINGS)
def test_spellings_of_a_word_are_one_word(first: str, second: str) -> None:
    """Accents, composed and compatibility forms, case, and invisible characters do not count."""
    one, other = tokenize([first, second])
    assert one == other != []


@pytest.mark.parametrize(
    "text", ["\u304c\u304b", "\ud55c\uad6d", "\u5317\u4eac", "\u0939\u093f\u0928\u094d"]
)
def test_marks_that_are_letters_are_kept(text: str) -> None:
    """Voiced kana, Korean syllables and Indian vowels are not accents."""
    assert fold(text) == unicodedata.normalize("NFC", text)


@given(st.text())
def test_folding_does_not_depend_on_the_form(text: str) -> None:
    """It is idempotent and leaves ASCII alone; the tokenizer lowers the case of the rest."""
    folded = fold(text).lower()
    assert fold(folded).lower() == folded
    for form in ("NFC", "NFD"):
        assert fold(unicodedata.normalize(form, text)).lower() == folded
    ascii_only = re.sub(r"[^\x00-\x7f]", "", text)
    assert fold(ascii_only) is ascii_only


CORPUS = [
    '{"id": "a", "contents": "\\"Capital\\"\\nBogot\u00e1 is high"}',
    '{"id": "b", "contents": "\\"Other\\"\\nLima is low"}',
]


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(CORPUS) + "\n")
    return Corpus.open(path)


def found(folder: Path, corpus: Corpus, query: str) -> list[str]:
    retriever = Bm25Retriever.open(folder, corpus, RetrieverConfig())
    return [hit.document.id for hit in retriever.search([query], 5)[0]]


def test_documents_and_queries_are_folded(tmp_path: Path, corpus: Corpus) -> None:
    """Each spelling finds the document, and the facts of the index name the analyzer."""
    folder = build_index(BuildConfig("bm25", str(corpus.path), str(tmp_path)))
    for query in ("Bogota", "bogot\u00e1", "BOGOTA\u0301", "\uff22ogota"):
        assert found(folder, corpus, query) == ["a"]
    assert Bm25Retriever.open(folder, corpus, RetrieverConfig()).info()["analyzer"] == FOLDED


def test_an_older_index_is_searched_as_it_was_built(tmp_path: Path, corpus: Corpus) -> None:
    """Its queries are not folded, its facts stay the same; an unknown analyzer is refused."""
    folder = build_index(BuildConfig("bm25", str(corpus.path), str(tmp_path)))
    older = tmp_path / "older"
    texts = [document.contents for document in corpus]
    index = bm25s.BM25()
    index.index(bm25s.tokenize(texts, stopwords="en", show_progress=False), show_progress=False)
    index.save(older, show_progress=False)
    manifest = Manifest.load(folder)
    facts = json.loads((folder / "manifest.json").read_text())
    del facts["analyzer"], facts["files"]
    (older / "manifest.json").write_text(json.dumps(facts))
    (older / "checksums.json").write_text("of every megabyte")  # earlier versions wrote them
    assert Manifest.load(older).analyzer == UNFOLDED != manifest.analyzer
    assert found(older, corpus, "bogot\u00e1") == ["a"] and found(older, corpus, "bogota") == []
    assert "analyzer" not in Bm25Retriever.open(older, corpus, RetrieverConfig()).info()
    (older / "manifest.json").write_text(json.dumps(facts | {"analyzer": "stemmed"}))
    with pytest.raises(IndexMismatch, match="stemmed"):
        found(older, corpus, "lima")
