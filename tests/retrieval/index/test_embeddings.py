"""The embedding file: shards, which are marked done only after their rows are on the disk."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from search_r1.retrieval.errors import SetupError
from search_r1.retrieval.index.embeddings import EmbeddingFile, blocks, open_embeddings
from tests.retrieval.conftest import write_corpus


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_shards_in_any_order_make_the_matrix(tmp_path: Path, dtype: str) -> None:
    """Two objects that write different shards fill one ordinary .npy file."""
    expected = np.random.default_rng(0).normal(size=(11, 3)).astype(dtype)
    first = EmbeddingFile.create(tmp_path, 11, 3, dtype, shard_rows=4)
    second = EmbeddingFile.create(tmp_path, 11, 3, dtype, shard_rows=4)
    assert first.missing() == [0, 1, 2]
    for file, shard in [(second, 2), (first, 0)]:
        file.write(shard, expected[file.rows(shard)])
    assert (first.missing(), second.num_done) == ([1], 7)
    second.write(1, expected[second.rows(1)])
    np.testing.assert_array_equal(np.load(tmp_path / "embeddings.npy"), expected)
    np.testing.assert_array_equal(first.matrix, expected)


def test_rows_are_on_the_disk_before_they_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If writing the rows to the disk fails, the shard is not done."""
    file = EmbeddingFile.create(tmp_path, 4, 2, "float32", shard_rows=4)

    def fail(handle: int) -> None:
        raise OSError("disk")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk"):
        file.write(0, np.ones((4, 2), dtype=np.float32))
    assert file.missing() == [0]


KILLED_WHEN_ALL_WAIT = """
import os, signal, sys, time
from pathlib import Path
from search_r1.retrieval.corpus import Corpus
from search_r1.retrieval.encoder import open_encoder
from search_r1.retrieval.index import embeddings
from search_r1.retrieval.settings import EncoderConfig
def wait(*_):
    while file.missing():
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)
embeddings.wait = wait
folder, settings = Path(sys.argv[1]), EncoderConfig("hash")
corpus = Corpus.open(folder / "corpus.jsonl")
file = embeddings.EmbeddingFile.create(folder, len(corpus), 64, "float32", 2)
embeddings.encode(file, corpus, open_encoder(settings), [settings] * 2, None)
"""


def test_a_killed_builder_leaves_no_process(tmp_path: Path) -> None:
    """Idle encoder processes, which hold GPU memory, exit when the builder is killed."""
    write_corpus(tmp_path / "corpus.jsonl")
    command = [sys.executable, "-c", KILLED_WHEN_ALL_WAIT, str(tmp_path)]
    builder = subprocess.Popen(command, start_new_session=True)
    assert builder.wait(60) == -signal.SIGKILL
    end = time.monotonic() + 20
    while alive_in_group(builder.pid) and time.monotonic() < end:
        time.sleep(0.05)
    survivors = alive_in_group(builder.pid)
    for pid in survivors:
        os.kill(pid, signal.SIGKILL)
    assert not survivors


def alive_in_group(group: int) -> list[int]:
    """Return the processes of a group, without zombies: in a container nobody may reap them."""
    alive = []
    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(process.pid) == group and process.info["status"] != "zombie":
                alive.append(process.pid)
    return alive


def test_existing_embeddings_may_be_bare_values(tmp_path: Path) -> None:
    """The dtype of values without a header, as older tools wrote them, follows from their size."""
    expected = np.arange(12, dtype=np.float32).reshape(4, 3)
    for dtype in (np.float32, np.float16):
        expected.astype(dtype).tofile(tmp_path / "e.memmap")
        np.testing.assert_array_equal(open_embeddings(tmp_path / "e.memmap", 4, 3), expected)


@pytest.mark.parametrize(
    ("matrix", "problem"),
    [(np.zeros((4, 2), np.float32), r"\(4, 2\)"), (np.zeros((4, 3)), "float64")],
)
def test_other_embeddings_are_refused(tmp_path: Path, matrix: np.ndarray, problem: str) -> None:
    """Another shape or dtype, a short file and a missing file are errors."""
    np.save(tmp_path / "e.npy", matrix)
    with pytest.raises(SetupError, match=problem):
        open_embeddings(tmp_path / "e.npy", 4, 3)
    (tmp_path / "e.memmap").write_bytes(b"a few bytes")
    with pytest.raises(SetupError):
        open_embeddings(tmp_path / "e.memmap", 4, 3)
    with pytest.raises(SetupError, match="No such file"):
        open_embeddings(tmp_path / "nowhere", 4, 3)


def test_blocks_are_the_matrix() -> None:
    """The blocks together have all rows, in order."""
    matrix = np.arange(14, dtype=np.float16).reshape(7, 2)
    np.testing.assert_array_equal(np.concatenate(list(blocks(matrix, 3))), matrix)
