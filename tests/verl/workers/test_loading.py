"""Ranks of one node read whole models at once where there is room, and else one after another."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from verl.workers import loading
from verl.workers.loading import loading_turn, needs_turns, weight_bytes

GIB = 2**30


@pytest.mark.parametrize(
    ("num_ranks", "files", "free", "expected"),
    [
        (8, 6, 200, False),
        (8, 6, 150, True),
        (8, 62, 1000, True),
        (1, 6, 30, False),
        (8, 0, 0, False),
    ],
)
def test_turns_are_taken_where_all_at_once_would_take_half_the_memory(
    num_ranks: int, files: int, free: int, expected: bool
) -> None:
    """Eight ranks that read 6 GiB of bfloat16 hold 96 GiB of float32: 200 are enough, 150 not."""
    assert needs_turns(files * GIB, num_ranks, free * GIB) is expected


@pytest.mark.parametrize("share", [0.0, 1e9])
def test_one_rank_reads_at_a_time(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With too little memory the second rank enters when the first has left, else before."""
    monkeypatch.setattr(loading, "MEMORY_SHARE", share)
    monkeypatch.setattr(loading.tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    is_inside = threading.Event()

    def second() -> None:
        with loading_turn([str(tmp_path)], 2):
            is_inside.set()

    thread = threading.Thread(target=second)
    with loading_turn([str(tmp_path)], 2):
        thread.start()
        is_inside_at_once = is_inside.wait(0.5 if share == 0 else 30)
    thread.join(30)
    assert is_inside.is_set()
    assert is_inside_at_once is (share > 0)


def test_weights_are_counted_in_folders_only(tmp_path: Path) -> None:
    """Other files of a model do not count, and a name that was never downloaded is 0."""
    (tmp_path / "model-1.safetensors").write_bytes(b"x" * 7)
    (tmp_path / "model-2.safetensors").write_bytes(b"x" * 5)
    (tmp_path / "tokenizer.json").write_bytes(b"x" * 100)
    assert weight_bytes(str(tmp_path)) == 12
    assert weight_bytes("nobody/nothing-of-the-kind") == 0
    assert weight_bytes("/no/such/folder") == 0
