"""A file is there whole or as it was, whatever happens while it is written."""

import os
from pathlib import Path

import pytest

from tests.full_disk import files_up_to
from verl.files import Lines, is_of_files, whole_file


@pytest.mark.parametrize("is_lasting", [True, False])
@pytest.mark.parametrize("fails_in", ["body", "fsync", "replace", None])
def test_a_file_is_whole_or_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_in: str | None, is_lasting: bool
) -> None:
    """The body, the disk or the rename may fail: the old content stays, and nothing else does."""

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "f"
    path.write_text("old")
    if fails_in in ("fsync", "replace"):
        monkeypatch.setattr(os, fails_in, fail)
    try:
        with whole_file(path, is_lasting=is_lasting) as part:
            part.write_text("new")
            assert path.read_text() == "old"
            if fails_in == "body":
                fail()
    except KeyboardInterrupt:
        assert fails_in is not None
    is_old = fails_in in ("body", "replace") or (fails_in == "fsync" and is_lasting)
    assert path.read_text() == ("old" if is_old else "new")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("room", [0, 1, 5])
def test_a_line_is_there_whole_or_not_at_all(tmp_path: Path, room: int) -> None:
    """A disk that fills up in the midst of a line leaves the lines before it, and its name."""
    lines = Lines(tmp_path / "f")
    lines.append("first")
    with files_up_to(6 + room), pytest.raises(OSError, match="f'") as caught:
        lines.append("second")
    assert is_of_files(caught.value) and not is_of_files(ConnectionResetError(104, "reset"))
    lines.append("third \ud800")
    lines.close()
    assert (tmp_path / "f").read_text() == "first\nthird \\ud800\n"


def test_a_whole_file_that_has_no_room_is_named(tmp_path: Path) -> None:
    """The old content stays, and the error says which file was to be written."""
    (tmp_path / "f").write_text("old")
    with files_up_to(2), pytest.raises(OSError, match=r"/f'$"), whole_file(tmp_path / "f") as part:
        part.write_text("newer")
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
