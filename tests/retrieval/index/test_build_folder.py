"""The work folder of a build: locking, resuming, and publishing the complete index."""

from pathlib import Path

import pytest

from search_r1.retrieval.errors import CorpusError, SetupError
from search_r1.retrieval.index.build_folder import (
    READY_NAME,
    check_disk,
    fresh_folder,
    publish,
    work_folder,
)
from verl.errors import ConfigError

KEY = {"corpus": {"digest": "ab"}, "probe": [0.5, 0.25]}


def interrupted(target: Path, key: dict[str, object]) -> None:
    with pytest.raises(KeyboardInterrupt), work_folder(target, key) as work:
        (work / "kept").touch()
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("key", "is_kept"),
    [
        (KEY, True),
        (KEY | {"probe": [0.501, 0.249]}, True),
        (KEY | {"probe": [0.25, 0.5]}, False),
        (KEY | {"corpus": {"digest": "cd"}}, False),
    ],
)
def test_only_the_same_build_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, key: dict[str, object], is_kept: bool
) -> None:
    """A build of another corpus or encoder starts over; one with a rounded probe resumes."""
    interrupted(tmp_path / "x", KEY)
    with work_folder(tmp_path / "x", key) as work:
        assert (work / "kept").exists() == is_kept
    assert ("starting over" in caplog.text) == (not is_kept)


@pytest.mark.parametrize(
    "content", [b"[]", b"null", b"}{", b"\xff", b"[" * 100_000, b'{"probe": ["a", null]}', b""]
)
def test_a_damaged_key_starts_over(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it holds, the work is only done again."""
    interrupted(tmp_path / "x", KEY)
    next(tmp_path.glob(".x.*/key.json")).write_bytes(content)
    with work_folder(tmp_path / "x", KEY) as work:
        assert not (work / "kept").exists()
    assert "starting over" in caplog.text


def test_two_builders_exclude_each_other(tmp_path: Path) -> None:
    """A second builder is refused while the first one works, and accepted afterwards."""
    with (
        work_folder(tmp_path / "x", KEY),
        pytest.raises(ConfigError),
        work_folder(tmp_path / "x", KEY),
    ):
        pass
    with work_folder(tmp_path / "x", KEY):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_new_index_replaces_the_old_one(tmp_path: Path) -> None:
    """The finished index replaces the target, and no other file is left."""
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "old").touch()
    with work_folder(tmp_path / "x", KEY) as work:
        (fresh_folder(work / READY_NAME) / "new").touch()
        publish(work, tmp_path / "x")
    assert {path.name for path in (tmp_path / "x").iterdir()} == {"new"}
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_bad_corpus_leaves_no_work(tmp_path: Path) -> None:
    """After an error of the corpus the work is removed: the corrected corpus needs other work."""
    with pytest.raises(CorpusError), work_folder(tmp_path / "x", KEY):
        raise CorpusError("row 4")
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_folder_is_refused(tmp_path: Path) -> None:
    """A folder that cannot be created is an error with the fix."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--save_dir"), work_folder(tmp_path / "file" / "x", KEY):
        pass


def test_too_small_a_disk_is_refused(tmp_path: Path) -> None:
    """A build that does not fit on the disk is refused, with the needed size."""
    check_disk(tmp_path / "not" / "yet", 1000, "index")
    with pytest.raises(SetupError, match=r"1000000000\.0 GB \(index\)"):
        check_disk(tmp_path, 10**18, "index")
