"""A file is there whole or as it was, whatever happens while it is written."""

import os
from pathlib import Path

import pytest

from verl.files import whole_file


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
