"""Files of a data set on the hub: their listing, and their download in ranges with a checksum.

The hub's own library starts a file anew when the process was killed, so its documented addresses
are asked here: `/api/datasets/<repo>/tree/main` and `/datasets/<repo>/resolve/main/<file>`.
"""

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx

from search_r1.retrying import Backoff, TransientError, call_with_retries, parse_retry_after
from search_r1.search.index.progress import Report, progress
from verl.errors import UserError, explain, redact
from verl.files import sha256

T = TypeVar("T")

HUB = "https://huggingface.co"
FLASHRAG = "RUC-NLPIR/FlashRAG_datasets"
"""The published question sets."""
CHUNK_BYTES = 1 << 20
TIMEOUT = httpx.Timeout(60.0, connect=10.0)
INCOMPLETE = ".incomplete"
"""Ends the name of a file that is not whole and checked yet."""
MOST_LISTING = 64 << 20
MOST_PAGES = 1000
PLAIN_PATH = re.compile(r"(?=.{1,1000}\Z)\w[\w.-]{0,199}(/\w[\w.-]{0,199})*", re.ASCII)
"""Names that mean the same on every disk: no `..`, root, drive, control character, hidden file."""
RESERVED = re.compile(r"(?:\A|/)(?:con|prn|aux|nul|com\d|lpt\d)(?:[./]|\Z)", re.IGNORECASE)
"""Devices of Windows, in every folder."""
PAUSES = Backoff(1.0, 30.0, 300.0)
BUSY = (408, 425, 429)
"""Statuses below 500 that may pass."""


class DownloadError(UserError):
    """A file that cannot be fetched, is not what the hub says, or has no room."""


NOT_LISTED = (TransientError, httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, ValueError,
              TypeError, LookupError, AttributeError, RecursionError)  # fmt: skip
"""What a listing raises that cannot be had, or is none."""


@dataclass(frozen=True)
class HubFile:
    path: str
    size: int
    sha256: str | None
    """None for small files, of which the hub gives no SHA-256."""


@dataclass(frozen=True)
class Patience:
    """How an outage of the hub is waited out: as a whole, for five minutes and more."""

    tries: int = 20
    """Requests in a row that may bring nothing before giving up."""
    pauses: Backoff = PAUSES
    sleep: Callable[[float], None] = time.sleep

    def wait_out(self, attempt: Callable[[], T]) -> T:
        """What `attempt` returns once the hub is back; raises its last TransientError."""
        return call_with_retries(attempt, self.tries - 1, self.pauses, self.sleep)


def list_files(repo: str, prefix: str, patience: Patience = Patience()) -> list[HubFile]:
    """The files of a data set whose paths start with `prefix`, by name. Raises DownloadError."""
    try:
        files = [_read_entry(entry, prefix) for entry in _tree(repo, patience)]
    except NOT_LISTED as error:
        raise DownloadError(
            f"{repo} cannot be listed at {_told(_hub())} ({type(error).__name__}: {_told(error)}); "
            "expected the hub or a mirror to answer: check the network, or set HF_ENDPOINT"
        ) from error
    found = [file for file in files if file is not None]
    if not found:
        raise DownloadError(f"{repo} has no file {prefix}*; expected the published data set")
    return sorted(found, key=lambda file: file.path)


def _read_entry(entry: Any, prefix: str) -> HubFile | None:
    """A row of a listing; None for what is not wanted. Raises one of NOT_LISTED, DownloadError."""
    path, size, lfs = entry["path"], entry.get("size"), entry.get("lfs") or {}
    if entry["type"] != "file" or not path.startswith(prefix):
        return None
    if not PLAIN_PATH.fullmatch(path) or RESERVED.search(path):
        raise DownloadError(
            f"the hub lists {path[:200]!a}, expected plain names such as part_aa or bm25/x; "
            "nothing is written: use another mirror (HF_ENDPOINT)"
        )
    if type(size) is not int or size < 0:
        raise ValueError(f"size {size!r:.80} of {path}")
    sha256 = lfs.get("oid")
    if sha256 is not None and not re.fullmatch("[0-9a-f]{64}", sha256):
        raise ValueError(f"SHA-256 {sha256!r:.80} of {path}")
    return HubFile(path, size, sha256)


def fetch(repo: str, file: HubFile, folder: Path, patience: Patience = Patience()) -> Path:
    """The file in `folder`, checked; an interrupted one is gone on with. Raises DownloadError."""
    path = folder / file.path
    part = path.with_name(path.name + INCOMPLETE)
    if path.exists():
        if path.stat().st_size != file.size:
            raise DownloadError(
                f"{path} has {path.stat().st_size} bytes, expected the {file.size} that the hub "
                "has; it is another file: remove it, or name another folder"
            )
        return path  # it was checked before it got its name
    if not part.resolve().is_relative_to(folder.resolve()):
        raise DownloadError(
            f"{part} is a link to {part.resolve()}, expected a place in {folder}: remove it"
        )
    part.parent.mkdir(parents=True, exist_ok=True)
    part.touch()
    with progress(f"fetch {file.path}", "bytes", file.size, part.stat().st_size) as report:
        url = f"{_hub()}/datasets/{repo}/resolve/main/{file.path}"
        _fetch_rest(url, file, part, report, patience)
    verify(part, file)
    return part.replace(path)


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
    """The address of the hub; raises DownloadError for one that is none."""
    given = (os.environ.get("HF_ENDPOINT") or HUB).rstrip("/")
    try:
        url = httpx.URL(given)
        is_web = url.scheme in ("http", "https") and bool(url.host)
    except (httpx.InvalidURL, ValueError):
        is_web = False
    if not is_web:
        fix = "set it to https://... or unset it"
        raise DownloadError(explain("HF_ENDPOINT", repr(_told(given)), "an address", fix))
    return given


def _told(error: object) -> str:
    """The first line, without a password: httpx adds a link to an encyclopaedia of statuses."""
    return redact(str(error).partition("\n")[0])[:300] or type(error).__name__


def _tree(repo: str, patience: Patience) -> Iterator[Any]:
    """All entries of a repository, page by page."""
    url = f"{_hub()}/api/datasets/{repo}/tree/main?recursive=true"
    for _ in range(MOST_PAGES):
        body, following = patience.wait_out(partial(_get, url))
        yield from json.loads(body)
        if following is None:
            return
        url = following
    raise ValueError(f"more than {MOST_PAGES} pages")


def _get(url: str) -> tuple[bytes, str | None]:
    """The hub's answer, and where the next page is."""
    body = bytearray()
    try:
        with _open(url) as answer:
            for chunk in answer.iter_raw(CHUNK_BYTES):
                body += chunk
                if len(body) > MOST_LISTING:
                    raise ValueError(f"more than {MOST_LISTING} bytes")
    except TransientError as error:
        if isinstance(error.__cause__, httpx.ConnectError):  # rather a wrong address
            raise error.__cause__ from None
        raise
    return bytes(body), answer.links.get("next", {}).get("url")


@contextmanager
def _open(url: str, have: int = 0) -> Iterator[httpx.Response]:
    """The hub's answer from byte `have` on, without a token.

    Raises TransientError or httpx's errors.
    """
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    options: Any = {"headers": headers, "timeout": TIMEOUT, "follow_redirects": True}
    try:
        with httpx.stream("GET", url, **options) as answer:
            answer.raise_for_status()
            yield answer
    except httpx.HTTPStatusError as error:
        if error.response.status_code not in BUSY and not error.response.is_server_error:
            raise
        raise TransientError(_told(error), parse_retry_after(error.response.headers)) from error
    except httpx.UnsupportedProtocol:
        raise
    except httpx.TransportError as error:
        raise TransientError(_told(error)) from error


def _fetch_rest(url: str, file: HubFile, path: Path, report: Report, patience: Patience) -> None:
    """Ask for what `path` lacks, again where a connection broke, until it is whole."""

    def attempt() -> None:
        have, reason = path.stat().st_size, TransientError("the answer ended too early")
        try:
            _append(url, file, path, have, report)
        except TransientError as error:
            reason = error
        if path.stat().st_size <= have:
            raise reason

    try:
        while path.stat().st_size < file.size:
            patience.wait_out(attempt)
    except (TransientError, httpx.HTTPError) as error:
        raise DownloadError(
            f"{_told(url)} cannot be fetched ({_told(error)}); run the same command again, "
            "which goes on where this one stopped"
        ) from error


def _append(url: str, file: HubFile, path: Path, have: int, report: Report) -> None:
    """Append the bytes from `have` on; a server that knows no ranges starts the file anew."""
    with _open(url, have) as answer, path.open("ab") as written:
        if answer.status_code != httpx.codes.PARTIAL_CONTENT:
            written.truncate(0)
        for chunk in answer.iter_raw(CHUNK_BYTES):
            written.write(chunk)
            report(written.tell())
            if written.tell() > file.size:  # what is too long may have no end
                return
