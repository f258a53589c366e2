"""A malicious mirror: no file outside of the folder, no leaked token, errors of one line."""

import gzip
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from search_r1.datasets import download, hub
from search_r1.datasets.download import main

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
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    yield start
    for server in started:
        server.shutdown()
        server.server_close()


def row(path: Any, data: bytes = b"data", **fields: Any) -> dict[str, Any]:
    lfs = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 9}
    return {"type": "file", "path": path, "size": len(data), "oid": "", "lfs": lfs, **fields}


def mirror(listing: Any, data: bytes = b"data") -> Callable[[str], Answer]:
    raw = listing if isinstance(listing, bytes) else json.dumps(listing).encode()
    return lambda path: (200, {}, raw if path.startswith("/api/") else data)


UNSAFE_PATHS = ["part_/../../evil", "part_//x", "part_\\..\\evil", "part_\0", "part_\x1b[2J",
                "part_\u202egpj", "part_/.ssh/authorized_keys", "part_" + "a" * 300]  # fmt: skip


@pytest.mark.parametrize("path", UNSAFE_PATHS, ids=range(len(UNSAFE_PATHS)))
def test_unsafe_paths_are_refused(
    serve: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str
) -> None:
    """A listing with an unsafe path is an error before anything is written."""
    server = serve(mirror([row("part_aa"), row(path)]))
    assert main(["e5", "--save_dir", str(tmp_path / "in")]) == 2
    error = capsys.readouterr().err
    assert "plain names" in error and error.count("\n") == 1
    assert "\x1b" not in error and len(server.requests) == 1
    assert list(tmp_path.iterdir()) == []


LISTINGS = {
    "html": b"<html>", "object": b'{"error": "x"}', "nothing": b"[]", "nulls": b"[null]",
    "text size": [row("part_aa", size="many")], "number path": [row(7)],
    "folder": [row("part_aa", type="directory")], "other": [row("README.md")],
}  # fmt: skip


@pytest.mark.parametrize("listing", LISTINGS.values(), ids=LISTINGS)
def test_a_malformed_listing_is_an_error(
    serve: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str], listing: Any
) -> None:
    """A malformed listing is an error of one line before anything is downloaded."""
    serve(mirror(listing))
    assert main(["e5", "--save_dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and len(error) < 600
    assert "s3cret" not in error and list(tmp_path.iterdir()) == []


FILES: dict[str, tuple[Answer, str]] = {
    "short": ((200, {}, b"dat"), "size 4"),
    "long": ((200, {}, b"data" * 9), "size 4"),
    "other": ((200, {}, b"evil"), "SHA-256"),
    "refused": ((401, {}, b""), "401"),
    "missing": ((404, {}, b"<html>"), "404"),
    "broken": ((500, {}, b""), "500"),
    "nowhere": ((302, {"Location": "http://127.0.0.1:9/x"}, b""), "refused"),
}


@pytest.mark.parametrize(("answer", "message"), FILES.values(), ids=FILES)
def test_a_file_that_differs_from_the_listing_is_an_error(
    serve: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str], answer: Answer, message: str
) -> None:
    """Wrong sizes, checksums, statuses and redirects are errors; no complete file is left."""
    listing = mirror([row("part_aa")])
    serve(lambda path: listing(path) if path.startswith("/api/") else answer)
    assert main(["e5", "--save_dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1 and "s3cret" not in error
    assert not (tmp_path / "e5_Flat.index").exists()


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


@pytest.mark.parametrize("address", ["nonsense", "ftp://a", "http://", "http://[", "\0"])
def test_an_invalid_endpoint_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any, address: str
) -> None:
    """HF_ENDPOINT is checked before a request."""
    monkeypatch.setattr(hub.os, "environ", {"HF_ENDPOINT": address})
    assert main(["e5", "--save_dir", str(tmp_path)]) == 2
    assert "HF_ENDPOINT" in capsys.readouterr().err


@pytest.mark.parametrize(
    "archive",
    [
        gzip.compress(b"x")[:15],
        b"\x1f\x8b\x08" + b"\0" * 7 + b"\xff" * 9,
    ],
    ids=["short", "no deflate"],
)
def test_invalid_archives_leave_no_files(tmp_path: Path, archive: bytes) -> None:
    """An invalid archive is an error and leaves no files."""
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
