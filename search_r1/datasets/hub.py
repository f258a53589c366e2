"""Files of a data set on the hub: their listing, and their download in ranges with a checksum.

The hub's own library starts a file anew when the process was killed, so its documented addresses
are asked here: `/api/datasets/<repo>/tree/main` and `/datasets/<repo>/resolve/main/<file>`.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from search_r1.retrying import retry_after
from search_r1.search.index.progress import Report, progress

logger = logging.getLogger(__name__)

HUB = "https://huggingface.co"
CHUNK_BYTES = 1 << 20
TIMEOUT = httpx.Timeout(60.0, connect=10.0)
INCOMPLETE = ".incomplete"
"""Ends the name of a file that is not whole and checked yet."""
BUSY = (408, 425, 429)
"""Statuses below 500 that may pass."""


class DownloadError(Exception):
    """A file that cannot be fetched, is not what the hub says, or has no room."""


@dataclass(frozen=True)
class HubFile:
    """What the hub says of a file."""

    path: str
    size: int
    sha256: str | None
    """None for small files, of which the hub gives no SHA-256."""


@dataclass(frozen=True)
class Patience:
    """How an outage of the hub is waited out: as a whole, for seven minutes and more."""

    tries: int = 20
    """Requests in a row that may bring nothing before giving up."""
    longest_pause: float = 30.0
    """Seconds; pauses grow 1, 2, 4 ... up to this."""
    longest_asked: float = 300.0
    """Seconds; the longest pause that a `Retry-After` may ask for."""
    sleep: Callable[[float], None] = time.sleep

    def wait(self, failures: int, error: httpx.HTTPError) -> bool:
        """Sleep before the next try; False, at once, where none is left or would help."""
        answer = error.response if isinstance(error, httpx.HTTPStatusError) else None
        is_final = answer and answer.status_code not in BUSY and not answer.is_server_error
        if is_final or failures >= self.tries:
            return False
        asked = min(retry_after(answer.headers), self.longest_asked) if answer else 0.0
        pause = max(asked, min(2.0 ** (failures - 1), self.longest_pause))
        logger.warning("%s; try %d of %d in %.0f s", _told(error), failures + 1, self.tries, pause)
        self.sleep(pause)
        return True


def list_files(repo: str, prefix: str, patience: Patience = Patience()) -> list[HubFile]:
    """The files of a data set whose paths start with `prefix`, by name."""
    try:
        entries = list(_tree(repo, patience))
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


def fetch(repo: str, file: HubFile, folder: Path, patience: Patience = Patience()) -> Path:
    """The file in `folder`, gone on with if an earlier run was interrupted, and checked.

    Raises DownloadError if it cannot be fetched or differs from the hub's SHA-256.
    """
    path = folder / file.path
    partial = path.with_name(path.name + INCOMPLETE)
    if path.exists():
        if path.stat().st_size != file.size:
            raise DownloadError(
                f"{path} has {path.stat().st_size} bytes, expected the {file.size} that the hub "
                "has; it is another file: remove it, or name another folder"
            )
        return path  # it was checked before it got its name
    partial.parent.mkdir(parents=True, exist_ok=True)
    partial.touch()
    with progress(f"fetch {file.path}", "bytes", file.size, partial.stat().st_size) as report:
        url = f"{_hub()}/datasets/{repo}/resolve/main/{file.path}"
        _fetch_rest(url, file, partial, report, patience)
    verify(partial, file)
    return partial.replace(path)


def have(file: HubFile, folder: Path) -> int:
    """The bytes of a file that are in `folder`, whole or not."""
    paths = (folder / file.path, folder / (file.path + INCOMPLETE))
    return next((path.stat().st_size for path in paths if path.is_file()), 0)


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


def _told(error: httpx.HTTPError) -> str:
    """The first line: httpx adds a link to an encyclopaedia of statuses."""
    return str(error).partition("\n")[0] or type(error).__name__


def _tree(repo: str, patience: Patience) -> Iterator[dict[str, Any]]:
    """All entries of a repository, page by page."""
    url: str | None = f"{_hub()}/api/datasets/{repo}/tree/main?recursive=true"
    while url:
        answer = _get(url, patience)
        yield from answer.json()
        url = answer.links.get("next", {}).get("url")


def _get(url: str, patience: Patience) -> httpx.Response:
    """The hub's answer; a hub that cannot be connected to at all is rather a wrong address."""
    for failures in itertools.count(1):
        try:
            answer = httpx.get(url, timeout=TIMEOUT, follow_redirects=True)
            return answer.raise_for_status()
        except httpx.HTTPError as error:
            if isinstance(error, httpx.ConnectError) or not patience.wait(failures, error):
                raise
    raise AssertionError("the count has no end")


def _fetch_rest(url: str, file: HubFile, partial: Path, report: Report, patience: Patience) -> None:
    """Ask for what `partial` lacks, again where a connection broke, until it is whole."""
    failures = 0
    while (have := partial.stat().st_size) < file.size:
        error: httpx.HTTPError = httpx.RemoteProtocolError("the answer ended too early")
        try:
            _append(url, partial, have, report)
        except httpx.HTTPError as raised:
            error = raised
        failures = 0 if partial.stat().st_size > have else failures + 1
        if failures and not patience.wait(failures, error):
            raise DownloadError(
                f"{url} cannot be fetched ({_told(error)}); run the same command again, which "
                "goes on where this one stopped"
            )


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
