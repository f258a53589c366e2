"""Embeddings of a whole corpus in one .npy file, filled by one or more processes and resumable.

Rows are written in shards. A shard's byte in `done.bin` is set only after its rows are on the
disk, and different processes write different bytes, so several can fill one file.
"""

import logging
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

from search_r1.retrieval.corpus import Corpus
from search_r1.retrieval.encoder import Encoder, cuts_of, open_encoder
from search_r1.retrieval.encoders.cuts import Cuts
from search_r1.retrieval.engines.flat_file import check_finite
from search_r1.retrieval.errors import SetupError
from search_r1.retrieval.index.progress import progress
from search_r1.retrieval.settings import EncoderConfig
from verl.files import atomic_write, fsync, regular_file

logger = logging.getLogger(__name__)

Matrix = npt.NDArray[Any]
"""(num_documents, dim), float32 or float16."""

FILE_NAME = "embeddings.npy"
DONE_NAME = "done.bin"
DTYPES = ("float32", "float16")
POLL_SECONDS = 0.5
_stop: Event
"""Tells this worker process to stop; set by `_start_worker`."""


class EmbeddingFile:
    """The embeddings of a corpus in a work folder, with the shards that are done."""

    def __init__(self, folder: Path, shard_rows: int) -> None:
        self._folder, self._shard_rows = folder, shard_rows
        self.matrix: np.memmap[Any, Any] = np.load(folder / FILE_NAME, mmap_mode="r+")
        self._done = np.memmap(folder / DONE_NAME, np.bool_, "r+")

    def __reduce__(self) -> tuple[Any, ...]:
        return EmbeddingFile, (self._folder, self._shard_rows)

    @classmethod
    def create(
        cls, folder: Path, count: int, dim: int, dtype: str, shard_rows: int
    ) -> "EmbeddingFile":
        """Open the file in `folder`, which is created (sparse) if missing."""
        if not ((folder / DONE_NAME).exists() and (folder / FILE_NAME).exists()):
            np.lib.format.open_memmap(  # type: ignore[no-untyped-call]
                folder / FILE_NAME, mode="w+", dtype=np.dtype(dtype), shape=(count, dim)
            ).flush()
            with atomic_write(folder / DONE_NAME, is_durable=True) as part:
                part.write_bytes(bytes(-(-count // shard_rows)))
        return cls(folder, shard_rows)

    def missing(self) -> list[int]:
        shards: list[int] = np.flatnonzero(~self._done).tolist()
        return shards

    def rows(self, shard: int) -> range:
        start = shard * self._shard_rows
        return range(start, min(start + self._shard_rows, len(self.matrix)))

    @property
    def num_done(self) -> int:
        """Number of rows that all processes have written."""
        unused = len(self._done) * self._shard_rows - len(self.matrix)  # rows of the last shard
        return int(self._done.sum()) * self._shard_rows - unused * int(self._done[-1])

    def write(self, shard: int, vectors: Matrix) -> None:
        """Write a shard's vectors (rows, dim) to the disk, then mark it done."""
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
) -> Cuts:
    """Encode the missing shards, in one process for each of several `settings`.

    Returns how many passages were encoded now, and how many of them were cut.
    """
    missing, total = file.missing(), Cuts("passages")
    with progress("encode", "documents", len(corpus), file.num_done) as report:
        if len(settings) < 2:
            total = fresh_cuts(encoder)
            for shard in missing:
                _encode_shard(file, shard, corpus, encoder)
                report(file.num_done)
            return total
        spawn = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        stop = spawn.Event()
        with ProcessPoolExecutor(len(settings), spawn, _start_worker, (stop,)) as pool:
            pending = set()
            for i, worker_settings in enumerate(settings):
                job = (file, corpus.path, worker_settings, missing[i :: len(settings)], max_length)
                pending.add(pool.submit(_encode_shards, *job))
            try:
                while pending:
                    done, pending = wait(pending, POLL_SECONDS, FIRST_EXCEPTION)
                    report(file.num_done)
                    for future in done:
                        counted = future.result()
                        total.limit = counted.limit
                        total.add(counted.num_texts, counted.num_cut)
            except BrokenProcessPool as error:
                raise SetupError(
                    "an encoder process died before its work was done; expected it to finish: see "
                    "its error above (if it was killed, often for lack of memory: use a smaller "
                    "--batch_size), then run the same command, which resumes where this one stopped"
                ) from error
            finally:
                stop.set()
    return total


def _start_worker(stop: Event) -> None:
    """Store the event that stops this worker process, and watch the parent process."""
    global _stop  # an event can be passed to a process only when it starts
    _stop = stop
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Exit when the parent dies; else the worker would wait for ever, and keep its GPU memory."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "this is a process of a pool"
    parent.join()
    os._exit(1)


def _encode_shards(
    file: EmbeddingFile,
    corpus_path: Path,
    settings: EncoderConfig,
    shards: list[int],
    max_length: int | None,
) -> Cuts:
    """Encode shards in a worker process; stops early if another worker failed."""
    corpus, encoder = Corpus.open(corpus_path), open_encoder(settings, max_length)
    cuts = fresh_cuts(encoder)
    for shard in shards:
        if _stop.is_set():
            break
        _encode_shard(file, shard, corpus, encoder)
    return cuts


def report_cuts(cuts: Cuts) -> None:
    """Warn if passages were cut."""
    if cuts.num_cut:
        logger.warning(
            "%d of %d passages (%.1f %%) have more than %d tokens, and their rest was cut off "
            "(--max_length, or the model's own limit)",
            cuts.num_cut,
            cuts.num_texts,
            100 * cuts.num_cut / cuts.num_texts,
            cuts.limit,
        )


def fresh_cuts(encoder: Encoder) -> Cuts:
    """Return the encoder's count of passages, set to 0; of one without a limit, it stays so."""
    cuts = next(iter(cuts_of(encoder)[1:]), Cuts("passages"))
    cuts.num_texts = cuts.num_cut = 0
    return cuts


def _encode_shard(file: EmbeddingFile, shard: int, corpus: Corpus, encoder: Encoder) -> None:
    passages = [document.contents for document in corpus.documents(file.rows(shard))]
    file.write(shard, encoder.encode_passages(passages))


def open_embeddings(path: Path, count: int, dim: int) -> Matrix:
    """Memory-map existing embeddings, a .npy file or bare values; raises SetupError."""
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
            f"float16 of shape ({count}, {dim}): give the corpus and encoder they were made with"
        )
    return matrix


def blocks(matrix: Matrix, rows: int = 65536, start: int = 0) -> Iterator[npt.NDArray[np.float32]]:
    """Yield blocks of `rows` from row `start` on as float32.

    Raises IndexMismatch for values that are not finite.
    """
    path = Path(getattr(matrix, "filename", None) or FILE_NAME)
    for row in range(start, len(matrix), rows):
        vectors = np.ascontiguousarray(matrix[row : row + rows], dtype=np.float32)
        check_finite(path, row, vectors)
        yield vectors
