"""Words of scripts without spaces: what they find, that Latin text stays, and the warnings."""

import csv
import json
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_r1.retrieval.corpus import Corpus
from search_r1.retrieval.engines.bm25 import Bm25Retriever
from search_r1.retrieval.index_builder import BuildConfig, build_index
from search_r1.retrieval.manifest import Manifest
from search_r1.retrieval.settings import RetrieverConfig
from search_r1.retrieval.tokenization import FOLDED, SCRIPTS, tokenize

ROOT = Path(__file__).resolve().parents[2]
with Path(__file__).with_name("chinese.tsv").open(encoding="utf-8") as file:
    WORLD = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
"""Title, text and a question that the passage answers, in other words than its own."""
PASSAGES = [f'"{title}"\n{text}' for title, text, _ in WORLD]
ENGLISH = [f'"Page {i}"\nA passage in English about 北京 {i}.' for i in range(200)]


def corpus_of(folder: Path, passages: Sequence[str]) -> Corpus:
    path = folder / "corpus.jsonl"
    rows = [json.dumps({"id": str(i), "contents": text}) for i, text in enumerate(passages)]
    path.write_text("\n".join(rows) + "\n")
    return Corpus.open(path)


def build(corpus: Corpus, **options: object) -> Path:
    folder = corpus.path.parent / "-".join(["index", *map(str, options.values())])
    return build_index(BuildConfig("bm25", str(corpus.path), str(folder), **options))  # type: ignore[arg-type]


def search(folder: Path, corpus: Corpus, queries: Sequence[str], k: int = 3) -> list[list[str]]:
    hits = Bm25Retriever.open(folder, corpus, RetrieverConfig()).search(queries, k)
    return [[hit.document.id for hit in some] for some in hits]


def test_chinese_questions_find_their_passages(tmp_path: Path) -> None:
    """By default at least 38 of 40 among the first three; by the other analyzer none or nearly."""
    corpus = corpus_of(tmp_path, PASSAGES)
    folder = build(corpus)
    assert Manifest.load(folder).analyzer == SCRIPTS
    questions = [question for *_, question in WORLD]
    found = search(folder, corpus, questions)
    assert sum(str(row) in ids for row, ids in enumerate(found)) >= 38
    assert [ids[0] for ids in search(folder, corpus, ["首都", "红楼梦的作者是谁"])] == ["0", "1"]
    before = search(build(corpus, analyzer=FOLDED), corpus, questions)
    assert sum(str(row) in ids for row, ids in enumerate(before)) <= 2


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("Oslo所在国家是什么", ["oslo"] * 3 + ["所", "在", "所在", "国", "在国", "家", "国家"]),
        ("Lagos 人口多少？", ["lagos"] * 5 + ["人", "口", "人口"]),
        ("what is the capital of Oslo", ["what", "capital", "oslo"]),
        ("是什么", ["是", "什", "是什", "么", "什么"]),
        ("", []),
    ],
)
def test_words_of_queries(query: str, words: list[str]) -> None:
    """Names in letters weigh as much as in characters, beside those; what asks is left out."""
    assert tokenize([query], SCRIPTS, of_queries=True) == [words]
    if query.isascii():
        assert tokenize([query], SCRIPTS) == [words]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1990年 in 北京。", ["1990", "年", "北", "北京", "京"]),
        ("ＡＢＣ東京タワー", ["abc", "東", "東京", "京", "京タ", "タ", "タワ", "ワ", "ワー", "ー"]),
        ("서울은", ["서", "서울", "울", "울은", "은"]),
        ("กินดี", ["กิ", "น", "กิน", "ดี", "นดี"]),
        ("दिल्ली की", ["दिल्ली", "की"]),
        ("ジョン・レノン", ["ジ", "ジョ", "ョ", "ョン", "ン", "レ", "レノ", "ノ", "ノン", "ン"]),
    ],
)
def test_words_by_script(text: str, words: list[str]) -> None:
    """Characters and pairs, which punctuation parts; marks stay with their letters."""
    assert sorted(tokenize([text], SCRIPTS)[0]) == sorted(words)


@given(st.text(st.characters(max_codepoint=0x8FF, exclude_categories=("Cs", "M"))))
def test_latin_text_has_the_words_that_it_had(text: str) -> None:
    """So have Greek, Cyrillic, Hebrew and Arabic: the analyzers differ for other scripts only."""
    assert tokenize([text], SCRIPTS) == tokenize([text], FOLDED)


def test_an_english_index_stays(tmp_path: Path) -> None:
    """It is chosen for English with Chinese names; the other one has the same files for ASCII."""
    english = corpus_of(tmp_path, ENGLISH)
    assert Manifest.load(build(english)).analyzer == FOLDED
    ascii_only = Corpus.open(ROOT / "example" / "corpus.jsonl")
    folders = [
        build_index(BuildConfig("bm25", str(ascii_only.path), str(tmp_path / name), analyzer=name))
        for name in (FOLDED, SCRIPTS)
    ]
    first, second = ({p.name: p for p in folder.glob("*.npy")} for folder in folders)
    assert first.keys() == second.keys() != set()
    assert all(np.array_equal(np.load(first[n]), np.load(second[n])) for n in first)


@pytest.mark.parametrize(
    ("passages", "analyzer", "query", "num_warnings"),
    [
        (PASSAGES, SCRIPTS, "首都", [0, 0, 0]),
        (PASSAGES, FOLDED, "capital", [1, 1, 0]),
        (PASSAGES, FOLDED, "首都", [1, 1, 1]),
        (ENGLISH, FOLDED, "Bogotá", [0, 0, 0]),
        (ENGLISH, FOLDED, "首都", [0, 0, 1]),
    ],
)
def test_a_misfit_is_said(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    passages: list[str],
    analyzer: str,
    query: str,
    num_warnings: list[int],
) -> None:
    """At the build, when the server opens the index, and at the first such query, once."""
    caplog.set_level(logging.WARNING)
    counts, corpus = [], corpus_of(tmp_path, passages)
    folder = build(corpus, analyzer=analyzer)
    counts.append(len(caplog.records))
    retriever = Bm25Retriever.open(folder, corpus, RetrieverConfig())
    counts.append(len(caplog.records) - sum(counts))
    for _ in range(2):
        retriever.search([query], 3)
    counts.append(len(caplog.records) - sum(counts))
    assert counts == num_warnings
    assert all("--analyzer scripts" in record.message for record in caplog.records)
