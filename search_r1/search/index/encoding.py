"""Fills an `EmbeddingFile` with an encoder: in this process, or in one process for each device."""

import logging
import multiprocessing
import os
from dataclasses import dataclass, replace
from pathlib import Path

from search_r1.search.backends.settings import EncoderConfig
from search_r1.search.corpus import Corpus
from search_r1.search.encoder import open_encoder
from search_r1.search.encoders.interface import Encoder
from search_r1.search.errors import SearchError, SetupError
from search_r1.search.index.embeddings import EmbeddingFile
from search_r1.search.index.progress import Report, progress

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LOOKS = 0.5


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
    spawn = multiprocessing.get_context("spawn")
    errors: multiprocessing.SimpleQueue[SearchError] = spawn.SimpleQueue()
    missing = file.missing()
    processes = [
        spawn.Process(
            target=_work, args=(job, device, missing[i :: len(devices)], errors), daemon=True
        )
        for i, device in enumerate(devices)
    ]
    for process in processes:
        process.start()
    try:
        while any(process.is_alive() for process in processes):
            next(p for p in processes if p.is_alive()).join(SECONDS_BETWEEN_LOOKS)
            report(file.num_done)
            if any(process.exitcode for process in processes):
                break
    finally:
        for process in processes:
            process.terminate()
            process.join()
    _raise_first(devices, [process.exitcode for process in processes], errors)


def _raise_first(
    devices: tuple[str, ...],
    statuses: list[int | None],
    errors: "multiprocessing.SimpleQueue[SearchError]",
) -> None:
    if not errors.empty():
        raise errors.get()
    for device, status in zip(devices, statuses, strict=True):
        if status:
            raise SetupError(
                f"the encoder process on {device} ended with status {status}; expected 0: see "
                "its error above (-9 is often a lack of memory: a smaller --batch_size), then "
                "run the same command, which goes on where this one stopped"
            )


def _work(
    job: EncodeJob,
    device: str,
    shards: list[int],
    errors: "multiprocessing.SimpleQueue[SearchError]",
) -> None:
    """The life of one process; it ends when its parent has gone."""
    parent = os.getppid()
    file = EmbeddingFile(job.folder, job.shard_rows)

    def stop_if_orphaned(done: int) -> None:
        if os.getppid() != parent:
            raise SystemExit(1)

    try:
        corpus = Corpus.open(job.corpus_path)
        config = replace(job.encoder, encoder_device=device)
        encoder = open_encoder(config, job.max_length)
        _encode_shards(file, shards, corpus, encoder, stop_if_orphaned)
    except SearchError as error:
        errors.put(error)
        raise SystemExit(1) from error
