"""Texts split into passages: no word lost, no passage over the limit, stable ids."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_r1.retrieval.corpus import Corpus
from search_r1.retrieval.errors import CorpusError
from search_r1.retrieval.index.passages import read_folder, split_file, split_text, write_corpus
from search_r1.retrieval.schema import Document

TEXT = st.text(alphabet=st.sampled_from("ab. !?\n\t#"), max_size=300)


@given(TEXT, st.integers(1, 12))
def test_every_word_is_kept_within_the_limit(text: str, max_words: int) -> None:
    """The passages have all words of the text in order, at most `max_words` each."""
    passages = split_text(text, max_words)
    assert [word for passage in passages for word in passage.split()] == text.split()
    assert all(1 <= len(passage.split()) <= max_words for passage in passages)


def test_sentences_stay_whole() -> None:
    """Passages take whole sentences while they fit; only sentences over the limit are split."""
    text = "One two three. Four five! Six\nseven\n\nEight nine. " + "x " * 12
    assert split_text(text, 5) == [
        "One two three. Four five!", "Six seven Eight nine.", "x x x x x", "x x x x x", "x x",
    ]  # fmt: skip


def test_titles_come_from_heading_or_name() -> None:
    """The title is the first heading, which is not text; otherwise it is the file's name."""
    heading = list(split_file("a/b.md", "\n# The Title #\nText here.\n# Later\nmore", 100))
    assert heading == [Document.from_title("a/b.md#0", "The Title", "Text here. # Later more")]
    assert [d.title for d in split_file("a/my_small  file.txt", "Text.", 100)] == ["my small file"]
    lines = ["# About C#", "## C # ##  \r", "# ##", "# #1"]
    titles = [next(split_file("name.md", f"{line}\ntext", 100)).title for line in lines]
    assert titles == ["About C#", "C #", "name", "#1"]


def test_a_heading_of_many_spaces_is_read_at_once() -> None:
    """The search for its end takes linear time: a cubic one would take hours here."""
    (passage,) = split_file("name.md", f"# A{' ' * 100_000}b #\ntext", 100)
    assert passage.title.split() == ["A", "b"]


def test_ids_depend_on_the_file_only(tmp_path: Path) -> None:
    """Adding a file changes no id and no passage of another file."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.md").write_text("One two. Three four.")
    before = list(read_folder(tmp_path, 2))
    assert [document.id for document in before] == ["deep/b.md#0", "deep/b.md#1"]
    (tmp_path / "a.TXT").write_text("New.")
    (tmp_path / "c.pdf").write_bytes(b"\xff")
    after = list(read_folder(tmp_path, 2))
    assert after[1:] == before and after[0].id == "a.TXT#0"


def test_corpus_reads_what_was_written(tmp_path: Path) -> None:
    """Titles with quotes and texts of other scripts are read back unchanged."""
    documents = [
        Document.from_title("a#0", 'A "b" c', "Zoë … 日本"),
        Document.from_title("b#0", "", "x"),
    ]
    assert write_corpus(documents, tmp_path / "new" / "c.jsonl") == 2
    assert list(Corpus.open(tmp_path / "new" / "c.jsonl")) == documents


@pytest.mark.parametrize(
    ("files", "max_words", "message"),
    [
        ({}, 9, "has no .txt or .md file"),
        ({"a.pdf": b"x"}, 9, "has no .txt or .md file"),
        ({"a.txt": b" \n", "b.txt": b""}, 9, "no passages"),
        ({"a.txt": b"ok\xe9", "b.txt": b"fine", "c.md": b"\xe9"}, 9, r"a\.txt \(byte 2\), .*c\.md"),
        ({"a.txt": b"x"}, 0, "passages of 0 words"),
    ],
)
def test_an_unusable_folder_is_refused(
    tmp_path: Path, files: dict[str, bytes], max_words: int, message: str
) -> None:
    """A folder without usable texts is refused; the error names every bad file."""
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError, match=message):
        write_corpus(read_folder(tmp_path, max_words), tmp_path / "out" / "c.jsonl")
    assert list((tmp_path / "out").iterdir()) == []
