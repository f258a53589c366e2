"""A malicious mirror: no file outside of the folder, no leaked token, errors of one line."""

import gzip
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from search_r1.datasets import download, hub
from search_r1.datasets.download import ITEMS, main
from search_r1.datasets.hub import HubFile, RetryPolicy, fetch

REPO = ITEMS["e5"].repo
Answer = tuple[int, dict[str, str], bytes]
Start = Callable[[Callable[[str], Answer]], Any]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Yield a function that starts servers, which answer by path; the first is the mirror."""
    started: list[ThreadingHTTPServer] = []

    def start(answer: Callable[[str], Answer]) -> ThreadingHTTPServer:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.server.requests.append(str(self.headers))  # type: ignore[attr-defined]
                status, headers, body = answer(self.path)
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.handle_error = lambda *_: None  # type: ignore[method-assign]
        server.requests = []  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        if not started:
            monkeypatch.setenv("HF_ENDPOINT", f"http://me:s3cret@127.0.0.1:{server.server_port}")
        started.append(server)
        return server

    monkeypatch.setenv("HF_TOKEN", "hf_s3cret")
    monkeypatch.setattr(RetryPolicy, "call", lambda self, attempt: attempt())
    yield start
    for server in started:
        server.shutdown()
        server.server_close()


def row(path: Any, data: bytes = b"data", **fields: Any) -> dict[str, Any]:
    lfs = {"oid": hashlib.sha256(data).hexdigest()}
    return {"type": "file", "path": path, "size": len(data), "lfs": lfs, **fields}


def mirror(listing: Any, data: bytes = b"data") -> Callable[[str], Answer]:
    raw = listing if isinstance(listing, bytes) else json.dumps(listing).encode()
    return lambda path: (200, {}, raw if path.startswith("/api/") else data)


UNSAFE_PATHS = [
    "part_/../../evil", "part_/../../../evil", "part_/..", "part_/.", "part_/./x", "part_//x",
    "part_/", "part_a/../../evil", "part_/...", "part_\\..\\..\\evil", "part_\\x",
    "part_:x", "part_a:stream", "part_/C:/evil", "part_/C:\\evil", "part_\0", "part_a\0/../x",
    "part_a\n", "part_\x1b[2J", "part_\x7f", "part_ ", "part_a b", "part_*", "part_?",
    "part_%2e%2e/x", "part_%00", "part_~", "part_/~/x", "part_$HOME", "part_`id`", "part_;rm",
    "part_|x", "part_é",
    "part_\u202egpj", "part_\uff0e\uff0e/x", "part_\ud800", "part_/CON", "part_/nul.txt",
    "part_/com1", "part_/.ssh/authorized_keys", "part_/.hidden", "part_" + "a" * 300,
    "part_" + "/a" * 900, "part_" + "a/" * 5000 + "x",
]  # fmt: skip


@pytest.mark.parametrize("path", UNSAFE_PATHS, ids=range(len(UNSAFE_PATHS)))
def test_unsafe_paths_are_refused(
    serve: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str
) -> None:
    """A listing with an unsafe path is an error before anything is written."""
    server = serve(mirror([row("part_aa"), row(path)]))
    assert main(["e5", "--save_dir", str(tmp_path / "in")]) == 2
    error = capsys.readouterr().err
    assert "plain names" in error and error.count("\n") == 1 and error.isprintable() is False
    assert "\x1b" not in error and len(server.requests) == 1
    assert list(tmp_path.iterdir()) == []


LISTINGS = {
    "empty": b"", "html": b"<html>", "text": b'"text"', "number": b"3", "null": b"null",
    "object": b'{"error": "x"}', "nothing": b"[]", "half": b'[{"type"', "bytes": b"\xff\xfe\x00",
    "deep": b"[" * 100_000, "numbers": b"[1, 2]", "nulls": b"[null]", "lists": b"[[]]",
    "no path": b'[{"type": "file"}]', "too much": b" " * 200_000,
    "no size": [row("part_aa", size=None)], "text size": [row("part_aa", size="4")],
    "negative": [row("part_aa", size=-1)], "half a byte": [row("part_aa", size=1.5)],
    "true": [row("part_aa", size=True)], "number path": [row(7)], "list path": [row(["part_aa"])],
    "null path": [row(None)], "text lfs": [row("part_aa", lfs="x")],
    "list lfs": [row("part_aa", lfs=[1])], "short sum": [row("part_aa", lfs={"oid": "abc"})],
    "number sum": [row("part_aa", lfs={"oid": 7})],
    "sum of a path": [row("part_aa", lfs={"oid": "../" * 21 + "x"})],
    "symlink": [row("part_aa", type="symlink")], "folder": [row("part_aa", type="directory")],
    "vast": [row("part_aa", size=10**30)], "other": [row("README.md")],
}  # fmt: skip


@pytest.mark.parametrize("listing", LISTINGS.values(), ids=LISTINGS)
def test_a_malformed_listing_is_an_error(
    serve: Start,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    listing: Any,
) -> None:
    """A malformed listing is an error of one line before anything is downloaded."""
    monkeypatch.setattr(hub, "MAX_LISTING_BYTES", 150_000)
    serve(mirror(listing))
    assert main(["e5", "--save_dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and len(error) < 600
    assert "s3cret" not in error and list(tmp_path.iterdir()) == []


FILES: dict[str, tuple[Answer, str]] = {
    "short": ((200, {}, b"dat"), "ended too early"),
    "long": ((200, {}, b"data" * 9), "expected 4"),
    "endless": ((200, {"Content-Length": str(10**12)}, b"x" * (4 << 20)), "expected 4"),
    "other": ((200, {}, b"evil"), "SHA-256"),
    "empty": ((200, {}, b""), "ended too early"),
    "packed": ((200, {"Content-Encoding": "gzip"}, gzip.compress(b"data")), "expected 4"),
    "partial": ((206, {"Content-Range": "bytes 9-12/4"}, b"evil"), "SHA-256"),
    "not modified": ((304, {}, b""), "304"),
    "refused": ((401, {}, b""), "401"),
    "missing": ((404, {}, b"<html>"), "404"),
    "range": ((416, {}, b""), "416"),
    "broken": ((500, {}, b""), "500"),
    "loop": ((302, {"Location": "/loop"}, b""), "redirects"),
    "a file": ((302, {"Location": "file:///etc/passwd"}, b""), "protocol"),
    "ftp": ((302, {"Location": "ftp://127.0.0.1/x"}, b""), "protocol"),
    "no address": ((302, {"Location": "http://[::1"}, b""), "Location|location|URL"),
    "nowhere": ((302, {"Location": "http://127.0.0.1:9/x"}, b""), "refused"),
}


@pytest.mark.parametrize(("answer", "messages"), FILES.values(), ids=FILES)
def test_a_file_that_differs_from_the_listing_is_an_error(
    serve: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str], answer: Answer, messages: str
) -> None:
    """Wrong sizes, checksums, statuses and redirects are errors; no complete file is left."""
    listing = mirror([row("part_aa")])
    serve(lambda path: listing(path) if path.startswith("/api/") else answer)
    assert main(["e5", "--save_dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert any(message in error for message in messages.split("|")), error
    assert error.count("\n") == 1 and "s3cret" not in error
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert all(path.name.endswith(".incomplete") for path in files)
    assert sum(path.stat().st_size for path in files) <= 4


def test_a_token_does_not_follow_a_redirect(serve: Start, tmp_path: Path) -> None:
    """The token in the environment and the mirror's password are not sent to another host."""
    listing = mirror([row("part_aa")])
    first = serve(
        lambda path: (
            listing(path)
            if path.startswith("/api/")
            else (302, {"Location": f"http://localhost:{other.server_port}/x"}, b"")
        )
    )
    other = serve(lambda path: (200, {}, b"data"))
    assert main(["e5", "--save_dir", str(tmp_path)]) == 0
    assert (tmp_path / "e5_Flat.index").read_bytes() == b"data"
    assert len(first.requests) == 2 and len(other.requests) == 1
    assert "hf_s3cret" not in "".join(first.requests)
    assert "authorization" not in other.requests[0].lower()


def test_endless_pages_of_a_listing_are_an_error(
    serve: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """A listing whose next page is always the same is an error."""
    monkeypatch.setattr(hub, "MAX_PAGES", 5)
    server = serve(lambda path: (200, {"Link": f'<{address}/api/x>; rel="next"'}, b"[]"))
    address = f"http://127.0.0.1:{server.server_port}"
    assert main(["e5", "--save_dir", str(tmp_path)]) == 2
    assert "more than 5 pages" in capsys.readouterr().err


@pytest.mark.parametrize(
    "address", ["nonsense", "ftp://a", "http://", "http://[", "https://xn--/", "file:///etc", "\0"]
)
def test_an_invalid_endpoint_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any, address: str
) -> None:
    """HF_ENDPOINT is checked before a request."""
    monkeypatch.setattr(hub.os, "environ", {"HF_ENDPOINT": address})
    assert main(["e5", "--save_dir", str(tmp_path)]) == 2
    assert "HF_ENDPOINT" in capsys.readouterr().err


def test_one_client_fetches_all_files_and_keeps_no_cookies(
    serve: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Certificates are read once for a hub; a request does not repeat what another one got."""
    clients = []
    make_client = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda *a, **k: clients.append(1) or make_client(*a, **k))
    names = [f"part_a{letter}" for letter in "abc"]
    answer = mirror([row(name) for name in names])
    server = serve(lambda path: (200, {"Set-Cookie": "a=b"}, answer(path)[2]))
    for file in hub.list_files(REPO, "part_"):
        assert fetch(REPO, file, tmp_path).read_bytes() == b"data"
    assert len(server.requests) == 4 and len(clients) == 1
    assert not any("cookie" in headers.lower() for headers in server.requests)


def test_links_in_the_folder_are_not_followed(serve: Start, tmp_path: Path) -> None:
    """A link in the folder is not followed, so that no file outside is written."""
    serve(mirror([]))
    folder, outside = tmp_path / "in", tmp_path / "outside"
    folder.mkdir()
    outside.write_text("mine")
    (folder / "part_aa.incomplete").symlink_to(outside)
    with pytest.raises(hub.DownloadError):
        fetch(REPO, HubFile("part_aa", 9, None), folder)
    assert outside.read_text() == "mine"


@pytest.mark.parametrize(
    "archive",
    [
        gzip.compress(b"\0" * (8 << 20)),
        gzip.compress(b"x")[:15],
        b"\x1f\x8b\x08" + b"\0" * 7 + b"\xff" * 9,
    ],
    ids=["bomb", "short", "no deflate"],
)
def test_invalid_archives_leave_no_files(tmp_path: Path, archive: bytes) -> None:
    """An invalid archive and a decompression bomb are errors and leave no files."""
    path = tmp_path / "c.gz"
    path.write_bytes(archive)
    with pytest.raises(hub.DownloadError, match=r"not a complete \.gz"):
        download.unpack(path, tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_folder_is_an_error(
    serve: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A --save_dir that is a file is an error of one line."""
    serve(mirror([row("part_aa")]))
    (tmp_path / "file").write_text("x")
    assert main(["e5", "--save_dir", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
