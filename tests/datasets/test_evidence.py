"""Where evidence stands, against a loop over all passages."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_r1.datasets.evidence import (
    AnswerFinder,
    Evidence,
    Kind,
    evidence_of,
    kind_of,
    mentions,
    titles_by_answer,
)
from search_r1.retrieval.corpus import Corpus
from search_r1.retrieval.schema import Document
from search_r1.rewards.normalize import RULES, contains, normalize_answer
from tests.datasets.collection import write_jsonl

PAGES = [
    ("Snatch (film)", "Snatch is a film by Guy Ritchie; the series was made for Crackle."),
    ("Guy Ritchie", "An English director, born in 1968 in Hatfield."),
    ("Crackle", "A streaming service of Sony. 北京是首都。"),
    ("Hatfield", "A town. It has 41,265 people, 1966\u201367 and no end."),
]
PIECES = ["guy", "ritchie", "1966", "67", "\u2013", " ", "北京", "abc", "e\u0301", "e", ".", "-"]


def corpus_of(folder: Path, pages: list[tuple[str, str]]) -> Corpus:
    """Write a corpus of pages and open it."""
    rows = [{"id": str(i), "contents": f'"{t}"\n{x}'} for i, (t, x) in enumerate(pages)]
    return Corpus.open(write_jsonl(folder / "corpus.jsonl", list(rows)))


@given(
    st.lists(st.lists(st.sampled_from(PIECES), max_size=6).map("".join), max_size=6),
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    st.dictionaries(st.sampled_from(PIECES), st.integers(0, 9)),
    st.sampled_from(sorted(RULES)),
)
def test_answers_are_found_as_by_a_loop(
    answers: list[str], text: str, frequency: dict[str, int], rule: str
) -> None:
    """Every answer that the text contains is found, whatever words are thought to be rare."""
    normalize = RULES[rule]
    found = AnswerFinder(map(normalize, answers), frequency).in_text(normalize(text))
    by_loop = {gold for gold in map(normalize, answers) if contains(normalize(text), gold)}
    assert sorted(found) == sorted(by_loop)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_scan_names_the_pages_with_evidence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_processes: int
) -> None:
    """Titles are without what tells pages apart; blocks and processes change nothing."""
    monkeypatch.setattr("search_r1.datasets.evidence.BLOCK_ROWS", 2)
    corpus, reports = corpus_of(tmp_path, PAGES), list[int]()
    answers = ["crackle", "hatfield", "北京", "67", "nobody", ""]
    found = titles_by_answer(corpus, answers, "squad", num_processes, reports.append)
    assert found == {
        "crackle": {"snatch", "crackle"},
        "hatfield": {"guy ritchie", "hatfield"},
        "北京": {"crackle"},
        "67": {"hatfield"},
    }
    assert reports == [2, 4]


@pytest.mark.parametrize(
    ("answers", "documents", "expected"),
    [
        (["Crackle"], [0], (Evidence.TOPK, 1)),
        (["Crackle"], [1, 0], (Evidence.TOPK, 2)),
        (["Hatfield"], [0], (Evidence.LINKED, None)),
        (["Guy Ritchie"], [2], (Evidence.CORPUS, None)),
        (["Sony"], [], (Evidence.CORPUS, None)),
        (["Stanley", "Sony"], [0], (Evidence.LINKED, None)),
        (["Stanley Kubrick"], [0, 1], (Evidence.NOWHERE, None)),
        (["No"], [3], (Evidence.UNKNOWN, None)),
        (["the"], [0], (Evidence.NOWHERE, None)),
    ],
)
def test_the_nearest_place_counts(
    tmp_path: Path, answers: list[str], documents: list[int], expected: tuple[Evidence, int | None]
) -> None:
    """Documents come before pages that they mention, and these before the rest of the corpus."""
    corpus = corpus_of(tmp_path, PAGES)
    normalized = map(normalize_answer, answers)
    titles = titles_by_answer(corpus, normalized, "squad", 1, lambda done: None)
    found = corpus.documents(documents)
    assert evidence_of(answers, found, titles, normalize_answer) == expected


@given(st.text("ab ", max_size=12), st.sets(st.text("ab ", max_size=4), max_size=4))
def test_a_page_is_mentioned_in_whole_words(text: str, pages: set[str]) -> None:
    """A name counts where its words stand one after the other."""
    names = {normalize_answer(page) for page in pages}
    words = normalize_answer(text)
    expected = any(name and f" {name} " in f" {words} " for name in names)
    assert mentions(words, names) == expected


@pytest.mark.parametrize(
    ("question", "answers", "kind"),
    [
        ("Are both Dutch?", ["yes"], Kind.YES_NO),
        ("Which came first, Alien or Up?", ["Alien"], Kind.COMPARISON),
        ("Who directed Alien?", ["Ridley Scott", "Scott"], Kind.SPAN),
    ],
)
def test_kinds_of_questions(question: str, answers: list[str], kind: Kind) -> None:
    """Yes/no questions and choices between what the question names are told apart."""
    assert kind_of(question, answers, normalize_answer) is kind


def test_a_document_of_another_language_is_evidence() -> None:
    """An answer in a script without spaces is found within a sentence."""
    document = Document.from_contents("1", "中国的首都是北京")
    assert evidence_of(["北京"], [document], {}, normalize_answer) == (Evidence.TOPK, 1)


def test_pages_and_mentions_in_another_script(tmp_path: Path) -> None:
    """Punctuation and forms do not hide an answer, nor the name of a page within a sentence."""
    pages = [("《红楼梦》", "作者是曹雪芹。"), ("小说", "一部是《红楼梦》。生于１７１５年。")]
    corpus = corpus_of(tmp_path, pages)
    answers = ["曹雪芹", "1715年", "鲁迅"]
    titles = titles_by_answer(corpus, answers, "squad", 1, lambda done: None)
    assert titles == {"曹雪芹": {"红楼梦"}, "1715年": {"小说"}}
    found = corpus.documents([1])
    assert evidence_of(["《曹雪芹》"], found, titles, normalize_answer) == (Evidence.LINKED, None)
    assert evidence_of(["1715年"], found, titles, normalize_answer) == (Evidence.TOPK, 1)
