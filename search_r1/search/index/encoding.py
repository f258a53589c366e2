"""Fills an `EmbeddingFile` with an encoder: in this process, or in one process for each device."""

import multiprocessing
import os
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing.synchronize import Event
from pathlib import Path

from search_r1.search.backends.settings import EncoderConfig
from search_r1.search.corpus import Corpus
from search_r1.search.encoder import open_encoder
from search_r1.search.encoders.interface import Encoder
from search_r1.search.errors import SetupError
from search_r1.search.index.embeddings import EmbeddingFile
from search_r1.search.index.progress import Report, progress

SECONDS_BETWEEN_LOOKS = 0.5
_stop: Event
"""Of the process pool that this process belongs to."""


@dataclass(frozen=True)
class EncodeJob:
    """What a process needs to know to encode its part."""

    folder: Path
    """The work folder with the embedding file."""
    corpus_path: str
    encoder: EncoderConfig
    max_length: int | None
    shard_rows: int


def encode(job: EncodeJob, corpus: Corpus, encoder: Encoder, devices: tuple[str, ...]) -> None:
    """Encode every shard that is missing; `encoder` serves a single device."""
    file = EmbeddingFile(job.folder, job.shard_rows)
    with progress("encode", "documents", len(corpus), file.num_done) as report:
        if len(devices) < 2:
            _encode_shards(file, file.missing(), corpus, encoder, report)
        else:
            _encode_on(job, file, devices, report)


def visible_devices() -> tuple[str, ...]:
    """All GPUs that torch sees, else the CPU."""
    try:
        import torch  # noqa: PLC0415  (the hash encoder does without)
    except ImportError:
        return ("cpu",)
    return tuple(f"cuda:{i}" for i in range(torch.cuda.device_count())) or ("cpu",)


def _encode_shards(
    file: EmbeddingFile, shards: list[int], corpus: Corpus, encoder: Encoder, report: Report
) -> None:
    done = file.num_done
    for shard in shards:
        rows = file.rows(shard)
        passages = [document.contents for document in corpus.documents(rows)]
        file.write(shard, encoder.encode_passages(passages))
        done += len(rows)
        report(done)


def _encode_on(
    job: EncodeJob, file: EmbeddingFile, devices: tuple[str, ...], report: Report
) -> None:
    """One process per device; the first that fails ends the others, whose shards are kept."""
    spawn = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    stop, missing = spawn.Event(), file.missing()
    with ProcessPoolExecutor(len(devices), spawn, _share, (stop,)) as pool:
        parts = enumerate(devices)
        left = {pool.submit(_work, job, name, missing[i :: len(devices)]) for i, name in parts}
        try:
            while left:
                done, left = wait(left, SECONDS_BETWEEN_LOOKS, FIRST_EXCEPTION)
                report(file.num_done)
                for part in done:
                    part.result()
        except BrokenProcessPool as error:
            raise SetupError(
                "an encoder process ended before its work; expected none to: see its error above "
                "(a kill is often a lack of memory: a smaller --batch_size), then run the same "
                "command, which goes on where this one stopped"
            ) from error
        finally:
            stop.set()


def _share(stop: Event) -> None:
    """Keep the event that ends this process's work where `_work` finds it."""
    global _stop  # an event reaches a process only while it starts
    _stop = stop


def _work(job: EncodeJob, device: str, shards: list[int]) -> None:
    """The part of one process; it ends early when another part failed or its parent has gone."""
    parent = os.getppid()
    file = EmbeddingFile(job.folder, job.shard_rows)
    corpus = Corpus.open(job.corpus_path)
    encoder = open_encoder(replace(job.encoder, encoder_device=device), job.max_length)
    for shard in shards:
        if os.getppid() != parent:
            os._exit(1)  # the pool would wait for further work for ever
        if _stop.is_set():
            return
        _encode_shards(file, [shard], corpus, encoder, lambda done: None)
