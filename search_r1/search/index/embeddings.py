"""Embeddings of a whole corpus as one .npy file that survives a kill, and how it is filled.

Rows are written in shards. A shard's byte in `done.bin` is set only after its rows are on the
disk, and different processes write different bytes, so several can fill one file.
"""

import multiprocessing
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from search_r1.search.backends.flat_file import check_finite
from search_r1.search.corpus import Corpus
from search_r1.search.encoder import Encoder, open_encoder
from search_r1.search.errors import SetupError
from search_r1.search.index.progress import progress
from search_r1.search.settings import EncoderConfig
from verl.files import atomic_write, fsync, regular_file

Matrix = npt.NDArray[Any]
"""(num_documents, dim), float32 or float16."""

FILE_NAME = "embeddings.npy"
DONE_NAME = "done.bin"
DTYPES = ("float32", "float16")
SECONDS_BETWEEN_LOOKS = 0.5
_stop: Event
"""Of the process pool that this process belongs to."""


class EmbeddingFile:
    """The embeddings of a corpus in a work folder, and which shards of them are done."""

    def __init__(self, folder: Path, shard_rows: int) -> None:
        """Open what `create` made in `folder`."""
        self._folder, self._shard_rows = folder, shard_rows
        self.matrix: np.memmap[Any, Any] = np.load(folder / FILE_NAME, mmap_mode="r+")
        self._done = np.memmap(folder / DONE_NAME, np.bool_, "r+")

    def __reduce__(self) -> tuple[Any, ...]:
        return EmbeddingFile, (self._folder, self._shard_rows)

    @classmethod
    def create(
        cls, folder: Path, count: int, dim: int, dtype: str, shard_rows: int
    ) -> "EmbeddingFile":
        """The file in `folder`, made (sparse) if it is not there yet."""
        if not ((folder / DONE_NAME).exists() and (folder / FILE_NAME).exists()):
            np.lib.format.open_memmap(  # type: ignore[no-untyped-call]
                folder / FILE_NAME, mode="w+", dtype=np.dtype(dtype), shape=(count, dim)
            ).flush()
            with atomic_write(folder / DONE_NAME, is_durable=True) as part:
                part.write_bytes(bytes(-(-count // shard_rows)))
        return cls(folder, shard_rows)

    def missing(self) -> list[int]:
        """Shards that are not done, in order."""
        shards: list[int] = np.flatnonzero(~self._done).tolist()
        return shards

    def rows(self, shard: int) -> range:
        """The rows of a shard."""
        start = shard * self._shard_rows
        return range(start, min(start + self._shard_rows, len(self.matrix)))

    @property
    def num_done(self) -> int:
        """Rows that are on the disk, by all processes."""
        lacking = len(self._done) * self._shard_rows - len(self.matrix)  # in the last shard
        return int(self._done.sum()) * self._shard_rows - lacking * int(self._done[-1])

    def write(self, shard: int, vectors: Matrix) -> None:
        """Put a shard's vectors (rows, dim) on the disk, then mark it done."""
        rows = self.rows(shard)
        expected = (len(rows), self.matrix.shape[1])
        assert vectors.shape == expected, f"got {vectors.shape}, expected {expected}"
        check_finite(self._folder / FILE_NAME, rows.start, vectors)
        self.matrix[rows.start : rows.stop] = vectors
        fsync(self._folder / FILE_NAME)
        self._done[shard] = True
        fsync(self._folder / DONE_NAME)


def encode(
    file: EmbeddingFile,
    corpus: Corpus,
    encoder: Encoder,
    settings: Sequence[EncoderConfig],
    max_length: int | None,
) -> None:
    """Encode what is missing by `encoder`, or by processes, of which the first failure ends all."""
    missing = file.missing()
    with progress("encode", "documents", len(corpus), file.num_done) as report:
        if len(settings) < 2:
            for shard in missing:
                _encode_shard(file, shard, corpus, encoder)
                report(file.num_done)
            return
        spawn = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        stop = spawn.Event()
        with ProcessPoolExecutor(len(settings), spawn, _share, (stop,)) as pool:
            parts = ((one, missing[i :: len(settings)]) for i, one in enumerate(settings))
            left = {pool.submit(_work, file, corpus.path, *part, max_length) for part in parts}
            try:
                while left:
                    done, left = wait(left, SECONDS_BETWEEN_LOOKS, FIRST_EXCEPTION)
                    report(file.num_done)
                    for future in done:
                        future.result()
            except BrokenProcessPool as error:
                raise SetupError(
                    "an encoder process ended before its work; expected none to: see its error "
                    "above (a kill is often a lack of memory: a smaller --batch_size), then run "
                    "the same command, which goes on where this one stopped"
                ) from error
            finally:
                stop.set()


def _share(stop: Event) -> None:
    """Keep the event that ends this process's work where `_work` finds it; end with the parent."""
    global _stop  # an event reaches a process only while it starts
    _stop = stop
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A pool whose parent was killed would wait for further work for ever, and keep its GPU."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a pool starts its processes"
    parent.join()
    os._exit(1)


def _work(
    file: EmbeddingFile, path: Path, settings: EncoderConfig, shards: list[int], limit: int | None
) -> None:
    """The part of one process; it ends early when another part failed."""
    corpus, encoder = Corpus.open(path), open_encoder(settings, limit)
    for shard in shards:
        if _stop.is_set():
            return
        _encode_shard(file, shard, corpus, encoder)


def _encode_shard(file: EmbeddingFile, shard: int, corpus: Corpus, encoder: Encoder) -> None:
    passages = [document.contents for document in corpus.documents(file.rows(shard))]
    file.write(shard, encoder.encode_passages(passages))


def open_embeddings(path: Path, count: int, dim: int) -> Matrix:
    """Existing embeddings, .npy or the bare values, by memory map; raises SetupError otherwise."""
    try:
        with regular_file(path).open("rb") as file:
            is_npy = file.read(6) == b"\x93NUMPY"
        if is_npy:
            matrix: Matrix = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            size, rest = divmod(path.stat().st_size, count * dim)
            if rest or size not in (2, 4):
                raise ValueError(f"{path.stat().st_size} bytes are not {count} x {dim} values")
            matrix = np.memmap(path, np.dtype(f"f{size}"), mode="r", shape=(count, dim))
    except (OSError, ValueError, EOFError) as error:
        raise SetupError(
            f"embeddings {path} cannot be read ({error}); expected a .npy file or bare values: "
            "set --embedding_path"
        ) from error
    if matrix.shape != (count, dim) or matrix.dtype not in DTYPES:
        raise SetupError(
            f"embeddings {path} are {matrix.dtype} of shape {matrix.shape}; expected float32 or "
            f"float16 of shape ({count}, {dim}): the corpus and encoder they were made of"
        )
    return matrix


def blocks(matrix: Matrix, rows: int = 65536) -> Iterator[npt.NDArray[np.float32]]:
    """The matrix from top to bottom, `rows` at a time, as float32; IndexMismatch if not finite."""
    path = Path(getattr(matrix, "filename", None) or FILE_NAME)
    for start in range(0, len(matrix), rows):
        vectors = np.ascontiguousarray(matrix[start : start + rows], dtype=np.float32)
        check_finite(path, start, vectors)
        yield vectors
