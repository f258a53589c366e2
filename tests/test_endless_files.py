"""Files that never end, or are no files, are refused by each reader of a user's path."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest

from search_r1.datasets.command import OwnOptions
from search_r1.datasets.own import read_files
from search_r1.datasets.published import cache_finder
from search_r1.inference import batch
from search_r1.inference.batch import read_questions
from search_r1.retrieval.corpus import Corpus
from search_r1.retrieval.engines import diagnostics
from search_r1.retrieval.engines.replay import open_record
from search_r1.retrieval.errors import SearchError
from search_r1.rewards import build_reward
from tests.fakes import ByteTokenizer
from verl.agent.wording import read_format
from verl.data.rows import load_rows
from verl.errors import DataError, UserError
from verl.ext.sft.demonstrations import load_demonstrations
from verl.files import read_text

Reader = Callable[[str], object]
READERS: dict[str, Reader] = {
    "questions.txt": read_questions,
    "questions.jsonl": read_questions,
    "rows.jsonl": load_rows,
    "rows.parquet": load_rows,
    "own.csv": lambda path: list(read_files(OwnOptions(files=(Path(path),)))),
    "demonstrations.jsonl": lambda path: load_demonstrations(path, ByteTokenizer(), 100),
    "template.yaml": read_format,
    "oracle.jsonl": lambda path: diagnostics.load_rows(path, None),
    "record.jsonl": open_record,
    "corpus.jsonl": Corpus.open,
    "cache.json": lambda path: cache_finder([Path(path)], Path(path), 3),
    "reward.py": lambda path: build_reward(f"{path}:reward"),
}


@pytest.fixture(autouse=True)
def no_waiting() -> Iterator[None]:
    """Fail a reader that still waits after some seconds."""

    def too_long(_: int, __: FrameType | None) -> None:
        raise AssertionError("it is still reading")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", ["device", "pipe", "folder"])
@pytest.mark.parametrize("name", READERS)
def test_what_has_no_end_is_not_read(name: str, kind: str, tmp_path: Path) -> None:
    """A device, a pipe without a writer and a folder are refused in one line."""
    path = tmp_path / name
    if kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises((UserError, SearchError, ValueError)) as error:
        READERS[name](str(path))
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    assert "expected" in str(error.value)


def test_a_text_is_read_up_to_its_bound(tmp_path: Path) -> None:
    """A file of the maximum length is read whole; a longer one is refused by name."""
    path = tmp_path / "f"
    path.write_text("ä" * 10)
    assert read_text(path, 10) == "ä" * 10
    with pytest.raises(OSError, match="9 char") as error:
        read_text(path, 9)
    assert error.value.filename == str(path)


def test_a_pipe_that_was_given_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell's `<(command)` may provide questions, up to the same maximum."""
    monkeypatch.setattr(batch, "MAX_CHARS", 10)
    for text, is_taken in ((b"Who?\nWhy?", True), (b"Who?\n" * 10, False)):
        read, write = os.pipe()
        os.write(write, text)
        os.close(write)
        try:
            if is_taken:
                asked = read_questions(f"/dev/fd/{read}")
                assert [one.question for one in asked] == ["Who?", "Why?"]
            else:
                with pytest.raises(DataError, match="10 char"):
                    read_questions(f"/dev/fd/{read}")
        finally:
            os.close(read)
