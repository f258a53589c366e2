"""Downloads from a local server with the documented API of the hub: tree, resolve, ranges."""

import gzip
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from search_r1.datasets import download
from search_r1.datasets.command import build
from search_r1.datasets.download import ITEMS, JoinedFile, Plan, main, unpack
from search_r1.datasets.hub import DownloadError, HubFile, fetch, verify

MB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]


class Hub:
    """The state of the server: files by `repo/path`, recorded requests, and simulated failures."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.ranges: list[str] = []
        self.bodies: list[str] = []
        self.wrong_checksum = False
        self.supports_ranges = True
        self.failures: list[tuple[int, dict[str, str]]] = []
        """Statuses and headers of the next responses, which replace the requested content."""
        self.stall_after: int | None = None
        self.stalled = threading.Event()
        self.resume = threading.Event()

    def tree(self, repo: str) -> list[dict[str, object]]:
        """Return the listing of a repository."""
        prefix = repo + "/"
        return [
            self._entry(key.removeprefix(prefix), data)
            for key, data in self.files.items()
            if key.startswith(prefix)
        ]

    def _entry(self, path: str, data: bytes) -> dict[str, object]:
        digest = hashlib.sha256(b"other" if self.wrong_checksum else data).hexdigest()
        lfs = {"oid": digest, "size": len(data), "pointerSize": 130}
        return {"type": "file", "path": path, "size": len(data), "oid": "0" * 40, "lfs": lfs}


def handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._file(self.path.removeprefix("/datasets/").replace("/resolve/main", ""), b"")

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if hub.failures:
                self._send(hub.failures[0][0], b"", hub.failures.pop(0)[1])
                return
            if path.startswith("/api/datasets/"):
                repo = path.removeprefix("/api/datasets/").removesuffix("/tree/main")
                self._send(200, json.dumps(hub.tree(repo)).encode(), {})
                return
            key = path.removeprefix("/datasets/").partition("/resolve/")
            name = key[0] + "/" + key[2].partition("/")[2]
            hub.bodies.append(name)
            self._file(name, hub.files.get(name))

        def _file(self, name: str, body: bytes | None) -> None:
            data = hub.files.get(name)
            if data is None:
                self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
                return
            etag = f'"{hashlib.sha256(data).hexdigest()}"'
            facts = {"X-Repo-Commit": "1" * 40, "ETag": etag, "X-Linked-Etag": etag}
            facts["X-Linked-Size"] = str(len(data))
            asked = self.headers.get("Range")
            if asked and body and hub.supports_ranges:
                hub.ranges.append(asked)
                start = int(asked.removeprefix("bytes=").partition("-")[0])
                facts["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
                self._send(206, data[start:], facts)
            else:
                self._send(200, body or b"", facts, length=len(data))

        def _send(
            self, status: int, body: bytes, facts: dict[str, str], length: int | None = None
        ) -> None:
            self.send_response(status)
            for key, value in facts.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body) if length is None else length))
            self.end_headers()
            if hub.stall_after is not None and len(body) > hub.stall_after:
                self.wfile.write(body[: hub.stall_after])
                self.wfile.flush()
                hub.stall_after = None
                hub.stalled.set()
                hub.resume.wait(60)
                self.close_connection = True
                return
            self.wfile.write(body)

    return Handler


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Run a server that acts as the hub in this test."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(hub))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    yield hub
    hub.resume.set()
    server.shutdown()
    thread.join()
    server.server_close()


def publish(hub: Hub, parts: dict[str, bytes], name: str = "e5") -> None:
    hub.files |= {f"{ITEMS[name].repo}/{path}": data for path, data in parts.items()}


def test_parts_are_joined_and_removed(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parts become one file in order, no other file is left, and the serve command is printed."""
    publish(hub, {"part_ab": b"world" * 9, "part_aa": b"hello" * 7, "README.md": b"x"})
    assert main(["e5", "--save_dir", str(tmp_path)]) == 0
    assert (tmp_path / "e5_Flat.index").read_bytes() == b"hello" * 7 + b"world" * 9
    assert [path.name for path in tmp_path.iterdir()] == ["e5_Flat.index"]
    assert f"--index_path {tmp_path / 'e5_Flat.index'}" in capsys.readouterr().out
    fetched = len(hub.bodies)
    assert main(["e5", "--save_dir", str(tmp_path)]) == 0
    assert len(hub.bodies) == fetched, "a complete file is not downloaded again"


def test_corpus_is_unpacked_and_folder_kept(hub: Hub, tmp_path: Path) -> None:
    """The compressed corpus becomes jsonl; the BM25 index stays a folder."""
    publish(hub, {"wiki-18.jsonl.gz": gzip.compress(b'{"id": "1"}\n' * 99)}, "corpus")
    publish(hub, {"bm25/segments_1": b"s", "bm25/a.fdt": b"f"}, "bm25")
    assert main(["corpus", "bm25", "--save_dir", str(tmp_path)]) == 0
    assert (tmp_path / "wiki-18.jsonl").read_bytes() == b'{"id": "1"}\n' * 99
    assert sorted(p.name for p in (tmp_path / "bm25").iterdir()) == ["a.fdt", "segments_1"]


def test_a_killed_download_is_resumed(hub: Hub, tmp_path: Path) -> None:
    """After kill -9 the second run requests only the missing bytes."""
    data = os.urandom(25 * MB)
    publish(hub, {"part_aa": b"start", "part_ab": data})
    hub.stall_after = 24 * MB
    command = [sys.executable, "-m", "scripts.download", "e5", "--save_dir", str(tmp_path)]
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    incomplete = tmp_path / ".e5_Flat.index.parts" / "part_ab.incomplete"
    try:
        assert hub.stalled.wait(60)
        while incomplete.stat().st_size < 20 * MB:
            assert run.poll() is None
    finally:
        run.kill()
        run.wait()
    hub.resume.set()
    num_present = incomplete.stat().st_size
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert (tmp_path / "e5_Flat.index").read_bytes() == b"start" + data
    assert hub.ranges == [f"bytes={num_present}-"]
    assert hub.bodies.count(f"{ITEMS['e5'].repo}/part_aa") == 1


def test_a_broken_connection_is_resumed(hub: Hub, tmp_path: Path) -> None:
    """After a lost connection, one more request gets the remaining bytes."""
    data = os.urandom(13 * MB)
    publish(hub, {"part_aa": data})
    hub.stall_after = 12 * MB
    hub.resume.set()
    assert main(["e5", "--save_dir", str(tmp_path)]) == 0
    assert (tmp_path / "e5_Flat.index").read_bytes() == data
    assert len(hub.ranges) == 1


def test_a_server_without_ranges_restarts_the_file(hub: Hub, tmp_path: Path) -> None:
    """If the server ignores the range and sends the whole file, it replaces the partial one."""
    publish(hub, {"part_aa": b"whole file"})
    hub.supports_ranges = False
    (tmp_path / ".e5_Flat.index.parts").mkdir()
    (tmp_path / ".e5_Flat.index.parts" / "part_aa.incomplete").write_bytes(b"whole")
    assert main(["e5", "--save_dir", str(tmp_path)]) == 0
    assert (tmp_path / "e5_Flat.index").read_bytes() == b"whole file"


def test_wrong_checksum_is_refused(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file with a wrong checksum is removed and not joined."""
    publish(hub, {"part_aa": b"hello"})
    hub.wrong_checksum = True
    assert main(["e5", "--save_dir", str(tmp_path)]) == 2
    assert "SHA-256" in capsys.readouterr().err
    assert not (tmp_path / "e5_Flat.index").exists()
    assert not (tmp_path / ".e5_Flat.index.parts" / "part_aa").exists()
    hub.wrong_checksum = False
    assert main(["e5", "--save_dir", str(tmp_path)]) == 0


def test_dry_run_names_files_and_disk(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The dry run prints the sizes on the hub and downloads nothing."""
    publish(hub, {"part_aa": b"a" * 70, "part_ab": b"b" * 30})
    assert main(["e5", "--save_dir", str(tmp_path), "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "part_aa  70 bytes" in output and "part_ab  30 bytes" in output
    assert hub.bodies == [] and list(tmp_path.iterdir()) == []


def test_dry_run_without_the_hub_prints_published_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the hub does not answer, a dry run prints the published sizes; a real run fails."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # a closed port
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the library's attempts
    assert main(["e5", "--save_dir", str(tmp_path), "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "64.56 GB" in output and "published size" in output
    assert main(["e5", "--save_dir", str(tmp_path)]) == 2
    assert "HF_ENDPOINT" in capsys.readouterr().err


def test_too_small_a_disk_is_refused(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is downloaded if it does not fit on the disk."""
    publish(hub, {"part_aa": b"hello"})
    small: Callable[[Path, int], str] = lambda folder, need: f"{folder} has too little for {need}"  # noqa: E731
    monkeypatch.setattr(download, "disk_error", small)
    assert main(["e5", "--save_dir", str(tmp_path)]) == 2
    assert "too little for 5" in capsys.readouterr().err
    assert hub.bodies == []


def test_present_bytes_need_no_space(tmp_path: Path) -> None:
    """The space needed to resume a download excludes the bytes that are present."""
    files = (HubFile("part_aa", 5, None), HubFile("part_ab", 7, None))
    plan = Plan(ITEMS["e5"], files, tmp_path)
    assert (plan.disk_bytes, plan.missing_bytes) == (19, 19)
    (tmp_path / ".e5_Flat.index.partial").write_bytes(b"first")
    plan.parts_dir.mkdir()
    (plan.parts_dir / "part_ab.incomplete").write_bytes(b"sec")
    assert plan.missing_bytes == 19 - 8


@pytest.mark.parametrize("appended", [0, 3, 7])
def test_a_killed_join_appends_once(tmp_path: Path, appended: int) -> None:
    """Bytes of a part that a killed run appended are not appended twice."""
    parts = [HubFile("part_aa", 5, None), HubFile("part_ab", 7, None)]
    (tmp_path / ".x.partial").write_bytes(b"first" + b"seconds"[:appended])
    joined = JoinedFile(tmp_path / "x", parts)
    for part in joined.missing():
        path = tmp_path / part.path
        path.write_bytes(b"seconds")
        joined.append(part, path)
    joined.finish()
    assert (tmp_path / "x").read_bytes() == b"firstseconds"


def test_a_truncated_archive_is_refused(tmp_path: Path) -> None:
    """A truncated .gz is an error, not a smaller corpus."""
    archive = tmp_path / "c.gz"
    archive.write_bytes(gzip.compress(os.urandom(999))[:500])
    with pytest.raises(DownloadError, match=r"not a complete \.gz"):
        unpack(archive, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_a_file_of_another_size_is_refused(tmp_path: Path) -> None:
    """The size of small files without a checksum is verified."""
    path = tmp_path / "f"
    path.write_bytes(b"abc")
    with pytest.raises(DownloadError, match="3 bytes"):
        verify(path, HubFile("f", 4, None))


def test_a_refusal_is_an_error_with_its_status(hub: Hub, tmp_path: Path) -> None:
    """A permanent error names the status; the same command can be run again."""
    with pytest.raises(DownloadError, match=r"404.*same command again"):
        fetch("no/such", HubFile("part_aa", 5, None), tmp_path)


def test_the_originals_command(hub: Hub, tmp_path: Path) -> None:
    """`python scripts/download.py --save_path D` runs uninstalled and leaves the hub's files."""
    publish(hub, {"part_aa": b"hello", "part_ab": b"world"})
    packed = gzip.compress(b'{"id": "1"}\n')
    publish(hub, {"wiki-18.jsonl.gz": packed}, "corpus")
    done = subprocess.run(
        [sys.executable, "-S", str(ROOT / "scripts/download.py"), "--save_path", str(tmp_path)],
        # without `site` an editable install of this project is not found, other packages are
        env={**os.environ, "PYTHONPATH": sysconfig.get_path("purelib")},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    subprocess.run(["bash", "-ec", "\n".join(done.stdout.splitlines()[-3:-1])], check=True)
    names = ["e5_Flat.index", "part_aa", "part_ab", "wiki-18.jsonl"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert (tmp_path / "e5_Flat.index").read_bytes() == b"helloworld"


def test_a_file_of_another_index_is_an_error(hub: Hub, tmp_path: Path) -> None:
    """Indexes have parts with the same names, so a part of another size is an error."""
    publish(hub, {"part_aa": b"hello"})
    (tmp_path / "part_aa").write_bytes(b"another index")
    with pytest.raises(DownloadError, match="13 bytes, expected the 5"):
        fetch(ITEMS["e5"].repo, HubFile("part_aa", 5, None), tmp_path)


def test_items_or_save_path_must_be_given(tmp_path: Path) -> None:
    """Neither items nor --save_path, and both, are errors."""
    for arguments in ([], ["e5-hnsw64", "--save_path", str(tmp_path)]):
        assert main(arguments) == 2


def hotpotqa(split: str) -> bytes:
    """Return rows as on the hub; all questions have one paragraph in common."""
    rows = [
        {
            "id": f"{split}_{i}",
            "question": f"which {split} {i}?",
            "golden_answers": ["yes"],
            "metadata": {
                "context": {
                    "title": ["Shared", f"{split} {i}"],
                    "sentences": [["Same. "], ["One.", " Two."]],
                }
            },
        }
        for i in range(4)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def test_the_small_set_is_built_from_the_hub(hub: Hub, tmp_path: Path) -> None:
    """The set for example/smollm2 and the benchmarks has the requested questions and passages."""
    for name in ("train", "dev", "other"):
        hub.files[f"RUC-NLPIR/FlashRAG_datasets/hotpotqa/{name}.jsonl"] = hotpotqa(name)
    out = tmp_path / "set"
    assert build("small_hotpotqa", ["--local_dir", str(out), "--train", "3", "--dev", "1"]) == 0
    contents = [json.loads(row)["contents"] for row in (out / "corpus.jsonl").open()]
    assert contents[:2] == ['"Shared"\nSame.', '"train 0"\nOne. Two.']
    assert len(contents) == 5
    files = [str(out / "train.jsonl"), str(out / "dev.jsonl")]
    assert build("own_questions", [*files, "--local_dir", str(tmp_path / "rows")]) == 0
    assert sorted(p.name for p in (tmp_path / "rows").iterdir()) == ["dev.parquet", "train.parquet"]
    assert [name for name in hub.bodies if "other" in name] == []


def test_rows_without_paragraphs_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error for a row without paragraphs has file and row."""
    file = tmp_path / "hotpotqa" / "train.jsonl"
    file.parent.mkdir()
    file.write_text('{"question": "who?", "golden_answers": ["x"]}\n')
    assert build("small_hotpotqa", ["--local_dataset_path", str(tmp_path)]) == 2
    assert "train.jsonl, row 0 (counted from 0), metadata.context" in capsys.readouterr().err
