"""Lists the files of a data set on the hub, and downloads them resumably with checksums.

The hub's library restarts a file after a kill, so this uses the documented URLs of the hub:
`/api/datasets/<repo>/tree/main` and `/datasets/<repo>/resolve/main/<file>`.
"""

import functools
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.cookiejar import CookieJar, DefaultCookiePolicy
from pathlib import Path
from typing import Any, TypeVar

import httpx

from search_r1.retrieval.index.progress import Report, progress
from search_r1.retrying import Backoff, TransientError, call_with_retries, parse_retry_after
from verl.errors import UserError, explain, redact
from verl.files import sha256
from verl.proxies import client_settings

T = TypeVar("T")

HUB = "https://huggingface.co"
FLASHRAG = "RUC-NLPIR/FlashRAG_datasets"
"""Repository of the published question sets."""
CHUNK_BYTES = 1 << 20
TIMEOUT = httpx.Timeout(60.0, connect=10.0)
INCOMPLETE = ".incomplete"
"""Suffix of a file that is not complete and verified yet."""
MAX_LISTING_BYTES = 64 << 20
MAX_PAGES = 1000
PLAIN_PATH = re.compile(r"(?=.{1,1000}\Z)\w[\w.-]{0,199}(/\w[\w.-]{0,199})*", re.ASCII)
"""Paths that are safe everywhere: without `..`, root, drive, control characters, hidden files."""
RESERVED = re.compile(r"(?:\A|/)(?:con|prn|aux|nul|com\d|lpt\d)(?:[./]|\Z)", re.IGNORECASE)
"""Device names of Windows, which are reserved in every folder."""
BACKOFF = Backoff(1.0, 30.0, 300.0)
TRANSIENT_STATUSES = (408, 425, 429)
"""Statuses below 500 that are worth a retry."""


class DownloadError(UserError):
    """A file that cannot be downloaded, differs from the listing, or does not fit on the disk."""


LISTING_ERRORS = (TransientError, httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, ValueError,
              TypeError, LookupError, AttributeError, RecursionError)  # fmt: skip
"""Errors raised for a listing that cannot be downloaded or is malformed."""


@dataclass(frozen=True)
class HubFile:
    path: str
    size: int
    sha256: str | None
    """None for small files, for which the hub has no SHA-256."""


@dataclass(frozen=True)
class RetryPolicy:
    """Retries after failures of the hub; by default they bridge an outage of five minutes."""

    max_attempts: int = 20
    """Maximum number of consecutive requests without any progress."""
    backoff: Backoff = BACKOFF
    sleep: Callable[[float], None] = time.sleep

    def call(self, attempt: Callable[[], T]) -> T:
        """Return the result of `attempt`; raises its last TransientError."""
        return call_with_retries(attempt, self.max_attempts - 1, self.backoff, self.sleep)


def list_files(repo: str, prefix: str, retries: RetryPolicy = RetryPolicy()) -> list[HubFile]:
    """Return the files whose paths start with `prefix`, sorted by path. Raises DownloadError."""
    try:
        entries = [_read_entry(entry, prefix) for entry in _list_entries(repo, retries)]
    except LISTING_ERRORS as error:
        reason = f"{type(error).__name__}: {_short_message(error)}"
        raise DownloadError(
            f"{repo} cannot be listed at {_short_message(_hub_url())} ({reason}); "
            "expected the hub or a mirror to answer: check the network, or set HF_ENDPOINT"
        ) from error
    files = [file for file in entries if file is not None]
    if not files:
        raise DownloadError(f"{repo} has no file {prefix}*; expected the published data set")
    return sorted(files, key=lambda file: file.path)


def _read_entry(entry: Any, prefix: str) -> HubFile | None:
    """Return the file of a listing's entry, or None. Raises LISTING_ERRORS and DownloadError."""
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


def fetch(repo: str, file: HubFile, folder: Path, retries: RetryPolicy = RetryPolicy()) -> Path:
    """Download or resume a file, verify it and return its path. Raises DownloadError."""
    path = folder / file.path
    incomplete = path.with_name(path.name + INCOMPLETE)
    if path.exists():
        if path.stat().st_size != file.size:
            raise DownloadError(
                f"{path} has {path.stat().st_size} bytes, expected the {file.size} that the hub "
                "has; it is another file: remove it, or name another folder"
            )
        return path  # it was verified before it got this name
    if not incomplete.resolve().is_relative_to(folder.resolve()):
        raise DownloadError(
            f"{incomplete} is a link to {incomplete.resolve()}, expected a file in {folder}: "
            "remove it"
        )
    incomplete.parent.mkdir(parents=True, exist_ok=True)
    incomplete.touch()
    with progress(f"fetch {file.path}", "bytes", file.size, incomplete.stat().st_size) as report:
        url = f"{_hub_url()}/datasets/{repo}/resolve/main/{file.path}"
        _fetch_remaining(url, file, incomplete, report, retries)
    verify(incomplete, file)
    return incomplete.replace(path)


def bytes_on_disk(file: HubFile, folder: Path) -> int:
    """Return the size of a complete or incomplete file in `folder`."""
    paths = (folder / file.path, folder / (file.path + INCOMPLETE))
    return next((path.stat().st_size for path in paths if path.is_file()), 0)


def verify(path: Path, file: HubFile) -> None:
    """Raise DownloadError, and remove the file, if its size or SHA-256 differs from the hub's."""
    size = path.stat().st_size
    digest = sha256(path) if file.sha256 and size == file.size else None
    if size != file.size or digest != file.sha256:
        path.unlink()
        raise DownloadError(
            f"{file.path} has {size} bytes and SHA-256 {digest}, expected {file.size} and "
            f"{file.sha256}; it was removed: run the same command again"
        )


def disk_error(folder: Path, need: int) -> str | None:
    """Return an error message if `need` bytes do not fit on the disk of `folder`, else None."""
    existing = next(p for p in [folder.absolute(), *folder.absolute().parents] if p.exists())
    free = shutil.disk_usage(existing).free
    if need <= free:
        return None
    return (
        f"{folder} has {free / 1e9:.2f} GB free, but {need / 1e9:.2f} GB are needed; expected "
        "enough free space: free some, or give a --save_dir on another disk"
    )


def _hub_url() -> str:
    """Return the URL of the hub; raises DownloadError for an invalid HF_ENDPOINT."""
    endpoint = (os.environ.get("HF_ENDPOINT") or HUB).rstrip("/")
    try:
        url = httpx.URL(endpoint)
        is_valid = url.scheme in ("http", "https") and bool(url.host)
    except (httpx.InvalidURL, ValueError):
        is_valid = False
    if not is_valid:
        fix = "set it to https://... or unset it"
        got = repr(_short_message(endpoint))
        raise DownloadError(explain("HF_ENDPOINT", got, "an address", fix))
    return endpoint


def _short_message(error: object) -> str:
    """Return the first line without passwords; httpx adds a link to a page about the status."""
    return redact(str(error).partition("\n")[0])[:300] or type(error).__name__


def _list_entries(repo: str, retries: RetryPolicy) -> Iterator[Any]:
    url = f"{_hub_url()}/api/datasets/{repo}/tree/main?recursive=true"
    for _ in range(MAX_PAGES):
        body, next_url = retries.call(partial(_get_page, url))
        yield from json.loads(body)
        if next_url is None:
            return
        url = next_url
    raise ValueError(f"more than {MAX_PAGES} pages")


def _get_page(url: str) -> tuple[bytes, str | None]:
    """Return the body of a page and the URL of the next one."""
    body = bytearray()
    try:
        with _open_stream(url) as response:
            for chunk in response.iter_raw(CHUNK_BYTES):
                body += chunk
                if len(body) > MAX_LISTING_BYTES:
                    raise ValueError(f"more than {MAX_LISTING_BYTES} bytes")
    except TransientError as error:
        if isinstance(error.__cause__, httpx.ConnectError):  # probably a wrong address
            raise error.__cause__ from None
        raise
    return bytes(body), response.links.get("next", {}).get("url")


@functools.cache
def _client(hub: str) -> httpx.Client:
    """Return the client of this process for a hub, which reads the certificates once.

    It keeps no cookies, so that requests do not depend on earlier ones.
    """
    jar = CookieJar(DefaultCookiePolicy(allowed_domains=()))
    return httpx.Client(timeout=TIMEOUT, follow_redirects=True, cookies=jar, **client_settings(hub))


@contextmanager
def _open_stream(url: str, start: int = 0) -> Iterator[httpx.Response]:
    """Request a file from byte `start` on, without a token; raises TransientError or HTTPError."""
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
    try:
        with _client(_hub_url()).stream("GET", url, headers=headers) as response:
            response.raise_for_status()
            yield response
    except httpx.HTTPStatusError as error:
        response = error.response
        if response.status_code not in TRANSIENT_STATUSES and not response.is_server_error:
            raise
        raise TransientError(_short_message(error), parse_retry_after(response.headers)) from error
    except httpx.UnsupportedProtocol:
        raise
    except httpx.TransportError as error:
        raise TransientError(_short_message(error)) from error


def _fetch_remaining(
    url: str, file: HubFile, path: Path, report: Report, retries: RetryPolicy
) -> None:
    """Append the missing bytes to `path`, with new requests after lost connections."""

    def attempt() -> None:
        """Send one request; raises TransientError if it brings no further byte."""
        start = path.stat().st_size
        failure = TransientError("the answer ended too early")
        try:
            _append(url, file, path, start, report)
        except TransientError as error:
            failure = error
        if path.stat().st_size <= start:
            raise failure

    try:
        while path.stat().st_size < file.size:
            retries.call(attempt)
    except (TransientError, httpx.HTTPError) as error:
        raise DownloadError(
            f"{_short_message(url)} cannot be fetched ({_short_message(error)}); run the same "
            "command again, which resumes where this one stopped"
        ) from error


def _append(url: str, file: HubFile, path: Path, start: int, report: Report) -> None:
    """Append the bytes from `start` on; rewrites the file if the server does not support ranges."""
    with _open_stream(url, start) as response, path.open("ab") as output:
        if response.status_code != httpx.codes.PARTIAL_CONTENT:
            output.truncate(0)
        for chunk in response.iter_raw(CHUNK_BYTES):
            output.write(chunk)
            report(output.tell())
            if output.tell() > file.size:  # a response that is too long may be endless
                return
