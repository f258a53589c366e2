"""The hub's road: `datasets` against a server that answers as the hub documents, then offline."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow.parquet
import pytest

from search_r1.datasets.catalogue import HUB
from tests.datasets.collection import SPLITS, records

ROOT = Path(__file__).parents[2]
COMMIT = "a" * 40


def hub_files() -> dict[str, bytes]:
    """The collection's card with its configurations, and two sets."""
    card = ["---", "configs:"]
    files = {}
    for name in ("nq", "hotpotqa"):
        card += [f"- config_name: {name}", "  data_files:"]
        for split in SPLITS[name]:
            path = f"{name}/{split}.jsonl"
            card += [f"  - split: {split}", f"    path: {path}"]
            lines = (json.dumps(row) for row in records(name, split))
            files[path] = "\n".join(lines).encode()
    return {"README.md": "\n".join([*card, "---", ""]).encode(), **files}


FILES = hub_files()


class Hub(BaseHTTPRequestHandler):
    """`/api/datasets/<repo>` (facts, tree) and `/datasets/<repo>/resolve` (files)."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith(f"/api/datasets/{HUB}/tree/{COMMIT}"):
            folder = path.removeprefix(f"/api/datasets/{HUB}/tree/{COMMIT}").strip("/")
            self._json([entry(name) for name in FILES if name.startswith(folder)])
        elif path.startswith(f"/api/datasets/{HUB}"):
            self._json({"id": HUB, "sha": COMMIT, "siblings": [{"rfilename": f} for f in FILES]})
        else:
            self._file(path.removeprefix(f"/datasets/{HUB}/resolve/").partition("/")[2])

    def _file(self, name: str) -> None:
        if name not in FILES:
            self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            return
        self._send(200, FILES[name], {"ETag": f'"{digest(name)}"', "X-Repo-Commit": COMMIT})

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def digest(name: str) -> str:
    return hashlib.sha1(FILES[name]).hexdigest()


def entry(name: str) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(FILES[name]), "oid": digest(name)}


@pytest.fixture
def mirror() -> Iterator[str]:
    """The address of a hub."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def build(out: Path, home: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script as a user does, by its path, with a cache of its own."""
    path = ROOT / "scripts" / "data_process" / "qa_search_test_merge.py"
    command = [sys.executable, str(path), "--data_sources", "nq,hotpotqa", "--local_dir", str(out)]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    settings = {"HF_HOME": str(home), "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        command, env={**inherited, **settings}, capture_output=True, text=True, timeout=120
    )


def test_mirror_then_offline(mirror: str, tmp_path: Path) -> None:
    """HF_ENDPOINT's sets arrive through `datasets`; offline, the cache gives the same bytes."""
    fetched = build(tmp_path / "fetched", tmp_path / "home", HF_ENDPOINT=mirror)
    assert fetched.returncode == 0, fetched.stderr
    rows = pyarrow.parquet.read_table(tmp_path / "fetched" / "test.parquet").to_pylist()
    wanted = [("nq", row) for row in records("nq", "test")]
    wanted += [("hotpotqa", row) for row in records("hotpotqa", "dev")]
    assert [row["id"] for row in rows] == [f"{name}_{row['id']}" for name, row in wanted]
    assert [row["golden_answers"] for row in rows] == [r["golden_answers"] for _, r in wanted]
    cached = build(tmp_path / "cached", tmp_path / "home", HF_HUB_OFFLINE="1")
    assert cached.returncode == 0, cached.stderr
    left, right = (tmp_path / name / "test.parquet" for name in ("fetched", "cached"))
    assert left.read_bytes() == right.read_bytes()


def test_no_hub_is_told(tmp_path: Path) -> None:
    """Offline with an empty cache, one message names mirror and local files; status 2."""
    failed = build(tmp_path / "out", tmp_path / "home", HF_HUB_OFFLINE="1")
    assert failed.returncode == 2
    assert f"{HUB}/nq/test: got ConnectionError" in failed.stderr
    assert "HF_ENDPOINT" in failed.stderr and "--local_dataset_path" in failed.stderr
    assert "Traceback" not in failed.stderr
