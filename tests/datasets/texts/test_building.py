"""The written corpus: stable ids, whole rows, and every text that cannot be used in one error."""

import json
from pathlib import Path

import pytest

from search_r1.datasets.texts.building import MAX_PROBLEMS, write_corpus
from search_r1.datasets.texts.cutting import Cutter
from search_r1.retrieval.corpus import Corpus
from search_r1.retrieval.errors import CorpusError
from search_r1.retrieval.schema import Document

ROWS = [
    {"id": "short", "contents": '"A "b" c"\nZoë … 日本'},
    {"id": "long", "title": "T", "text": "One two. Three four."},
    {"id": "untitled", "text": "One\ntwo. Three four."},
]


def build(
    folder: Path, *, keep: bool = False, drop: bool = False, words: int = 2
) -> list[Document]:
    out = folder.parent / "new" / f"{folder.name}.jsonl"
    count = write_corpus([folder], out, Cutter(words), keep_rows=keep, drop_bad=drop)
    corpus = Corpus.open(out)
    assert count == len(corpus)
    corpus.check_rows(whole=True)
    return list(corpus)


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_ids_depend_on_the_file_only(tmp_path: Path) -> None:
    """Adding a file changes no id and no passage of another file."""
    (tmp_path / "a" / "deep").mkdir(parents=True)
    (tmp_path / "a/deep/b.md").write_text("# Title\nOne two. Three four.")
    before = build(tmp_path / "a")
    assert before == [
        Document.from_title("deep/b.md#0", "Title", "One two."),
        Document.from_title("deep/b.md#1", "Title", "Three four."),
    ]
    (tmp_path / "a/a_b.TXT").write_text("New.")
    after = build(tmp_path / "a")
    assert after[1:] == before and after[0] == Document.from_title("a_b.TXT#0", "a b", "New.")


def test_rows_keep_their_ids(tmp_path: Path) -> None:
    """A row that fits is unchanged; a longer one is cut, unless rows are kept."""
    write_rows(tmp_path / "a/rows.jsonl", ROWS)
    first = Document.from_contents("short", ROWS[0]["contents"])
    cut = build(tmp_path / "a", words=3)
    assert cut[0] == first and [document.id for document in cut[1:]] == [
        "long#0", "long#1", "untitled#0", "untitled#1"
    ]  # fmt: skip
    assert cut[3] == Document("untitled#0", "", "One two.", "One two.")
    kept = build(tmp_path / "a", keep=True, words=1)
    assert kept[0] == first and [document.text for document in kept[1:]] == [
        "One two. Three four.", "One two. Three four."
    ]  # fmt: skip


BAD = {
    "a.txt": "ok\ud8ff", "b.txt": " ", "r.jsonl": json.dumps({"id": "1", "text": "x"}) + "\n" +
    json.dumps({"id": "1", "text": "y"}) + "\n{}\n" + json.dumps({"id": "2", "text": "\ud800"}),
}  # fmt: skip


def test_all_bad_texts_are_named_or_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Wrong bytes, no text, a double id, a row without text and half a character: one error."""
    (tmp_path / "a").mkdir()
    for name, text in BAD.items():
        (tmp_path / "a" / name).write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(CorpusError, match=r"^5 bad texts") as raised:
        build(tmp_path / "a")
    lines = str(raised.value).splitlines()[1:]
    named = ["a.txt", "b.txt", "id 1: got the id a second time", "row 2", "id 2"]
    assert all(name in line for name, line in zip(named, lines, strict=True))
    assert list((tmp_path / "new").iterdir()) == []
    assert [document.text for document in build(tmp_path / "a", drop=True)] == ["x"]
    assert "left out 5 bad texts" in caplog.text


def test_titles_and_texts_of_their_own_stay(tmp_path: Path) -> None:
    rows = [
        {"id": "own", "title": "Tit", "text": "Body", "contents": "other"},
        {"id": "broken", "title": "x\ny", "text": "Body"},
    ]
    write_rows(tmp_path / "a/rows.jsonl", rows)
    assert build(tmp_path / "a", keep=True) == [
        Document("own", "Tit", "Body", "other"),
        Document.from_title("broken", "x y", "Body"),
    ]


def test_many_bad_rows_stop_at_once(tmp_path: Path) -> None:
    """A table that is none is not read to its end; nor is a corpus of nothing written."""
    write_rows(tmp_path / "a/rows.jsonl", [{}] * 9999)
    with pytest.raises(CorpusError, match=f"^{MAX_PROBLEMS} bad texts"):
        build(tmp_path / "a")
    with pytest.raises(CorpusError, match="no passages"):
        build(tmp_path / "a", drop=True)
