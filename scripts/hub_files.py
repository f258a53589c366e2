"""Files of a data set on the hub: their listing, and their download in ranges with a checksum.

The hub's own library starts a file anew when the process was killed, so its documented addresses
are asked here: `/api/datasets/<repo>/tree/main` and `/datasets/<repo>/resolve/main/<file>`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from search_r1.search.indexing.progress import Report, progress

logger = logging.getLogger(__name__)

HUB = "https://huggingface.co"
CHUNK_BYTES = 1 << 20
TRIES = 6
"""Requests in a row that may bring nothing before giving up."""
SECONDS_BETWEEN_TRIES = 1.0
TIMEOUT = httpx.Timeout(60.0, connect=10.0)


class DownloadError(Exception):
    """A file that cannot be fetched, is not what the hub says, or has no room."""


@dataclass(frozen=True)
class HubFile:
    """What the hub says of a file."""

    path: str
    size: int
    sha256: str | None
    """None for small files, of which the hub gives no SHA-256."""


def list_files(repo: str, prefix: str) -> list[HubFile]:
    """The files of a data set whose paths start with `prefix`, by name."""
    try:
        entries = list(_tree(repo))
    except (httpx.HTTPError, ValueError) as error:
        raise DownloadError(
            f"{repo} cannot be listed at {_hub()} ({error}); expected the hub or a mirror to "
            "answer: check the network, or set HF_ENDPOINT"
        ) from error
    files = [
        HubFile(entry["path"], entry["size"], entry.get("lfs", {}).get("oid"))
        for entry in entries
        if entry["type"] == "file" and entry["path"].startswith(prefix)
    ]
    if not files:
        raise DownloadError(f"{repo} has no file {prefix}*; expected the published data set")
    return sorted(files, key=lambda file: file.path)


def fetch(repo: str, file: HubFile, folder: Path) -> Path:
    """The file in `folder`, gone on with if an earlier run was interrupted, and checked.

    Raises DownloadError if it cannot be fetched or differs from the hub's SHA-256.
    """
    path = folder / file.path
    if path.exists():
        return path  # it was checked before it got its name
    partial = path.with_name(path.name + ".incomplete")
    partial.parent.mkdir(parents=True, exist_ok=True)
    partial.touch()
    with progress(f"fetch {file.path}", "bytes", file.size, partial.stat().st_size) as report:
        _fetch_rest(f"{_hub()}/datasets/{repo}/resolve/main/{file.path}", file, partial, report)
    verify(partial, file)
    return partial.replace(path)


def verify(path: Path, file: HubFile) -> None:
    """Raise DownloadError, and remove the file, if its size or SHA-256 is not the hub's."""
    size = path.stat().st_size
    found = sha256(path) if file.sha256 and size == file.size else None
    if size != file.size or found != file.sha256:
        path.unlink()
        raise DownloadError(
            f"{file.path} has {size} bytes and SHA-256 {found}, expected {file.size} and "
            f"{file.sha256}; it was removed: run the same command again"
        )


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def disk_error(folder: Path, need: int) -> str | None:
    """What is wrong with the disk of `folder` if `need` bytes do not fit, else None."""
    existing = next(p for p in [folder.absolute(), *folder.absolute().parents] if p.exists())
    free = shutil.disk_usage(existing).free
    if need <= free:
        return None
    return (
        f"{folder} has {free / 1e9:.2f} GB free, but {need / 1e9:.2f} GB are needed; expected "
        "room for all of it: free some, or give a --save_dir on another disk"
    )


def _hub() -> str:
    return (os.environ.get("HF_ENDPOINT") or HUB).rstrip("/")


def _tree(repo: str) -> Iterator[dict[str, Any]]:
    """All entries of a repository, page by page."""
    url: str | None = f"{_hub()}/api/datasets/{repo}/tree/main?recursive=true"
    while url:
        answer = httpx.get(url, timeout=TIMEOUT, follow_redirects=True)
        answer.raise_for_status()
        yield from answer.json()
        url = answer.links.get("next", {}).get("url")


def _fetch_rest(url: str, file: HubFile, partial: Path, report: Report) -> None:
    """Ask for what `partial` lacks, again where a connection broke, until it is whole."""
    tries = 0
    while (have := partial.stat().st_size) < file.size:
        try:
            _append(url, partial, have, report)
            problem = f"the answer ended after {partial.stat().st_size} of {file.size} bytes"
        except httpx.HTTPError as error:
            problem = str(error) or type(error).__name__
        tries = 0 if partial.stat().st_size > have else tries + 1
        if tries == TRIES:
            raise DownloadError(
                f"{url} cannot be fetched ({problem}); run the same command again, which goes on "
                "where this one stopped"
            )
        if tries:
            logger.warning("%s; trying again", problem)
            time.sleep(SECONDS_BETWEEN_TRIES * tries)


def _append(url: str, partial: Path, have: int, report: Report) -> None:
    """Append the bytes from `have` on; a server that knows no ranges starts the file anew."""
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    with (
        httpx.stream("GET", url, headers=headers, timeout=TIMEOUT, follow_redirects=True) as answer,
        partial.open("ab") as file,
    ):
        answer.raise_for_status()
        if answer.status_code != httpx.codes.PARTIAL_CONTENT:
            file.truncate(0)
        for chunk in answer.iter_bytes(CHUNK_BYTES):
            file.write(chunk)
            report(file.tell())
