"""The original Search-R1's programs, run as files from any folder without installation."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from search_r1.retrieval import command, index_builder

ROOT = Path(__file__).resolve().parents[2]
SITE = sysconfig.get_path("purelib")
ITEM = {"link": "http://a", "title": "A", "snippet": "found"}


def start(file: str, *flags: str, path: str = SITE) -> subprocess.Popen[str]:
    """Run a file with a Python that has other packages, but not this project, installed."""
    return subprocess.Popen(
        [sys.executable, "-S", str(ROOT / file), *flags],
        env={**os.environ, "PYTHONPATH": path, "NO_PROXY": "*"},
        cwd="/",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outcome(file: str, *flags: str, path: str = SITE) -> tuple[int, str]:
    """Return exit status and standard error of a command."""
    process = start(file, *flags, path=path)
    errors = process.communicate(timeout=60)[1]
    return process.returncode, errors


@pytest.fixture
def service() -> Iterator[tuple[str, list[str]]]:
    """The url of a fake for both search services, and the paths that were requested."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            answer = {"kind": "customsearch#search", "items": [ITEM], "organic_results": [ITEM]}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/search", asked
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("google", ["--api_key", "K", "--cse_id", "C", "--snippet_only", "--online_url"]),
        ("serp", ["--serp_api_key", "K", "--serp_engine", "google", "--search_url"]),
    ],
)
def test_an_online_server_starts_with_the_originals_flags(
    name: str, keys: list[str], service: tuple[str, list[str]], tmp_path: Path
) -> None:
    """It sends the key of the command line to the service, and serves our wire contract."""
    url, asked = service
    port_file = tmp_path / "port"
    file = f"search_r1/search/{name}_search_server.py"
    flags = [*keys, url, "--topk", "1", "--port", "0", "--port_file", str(port_file)]
    process = start(file, *flags)
    try:
        while not port_file.exists():
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.05)
        answer = httpx.post(
            f"http://127.0.0.1:{port_file.read_text().strip()}/retrieve",
            json={"queries": ["who"]},
            trust_env=False,
        )
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert [document["text"] for document in answer.json()["result"][0]] == ["found"]
    assert "key=K" in asked[0] and "q=who" in asked[0]


def test_the_server_as_a_file_says_how_to_install_a_missing_package(tmp_path: Path) -> None:
    """The printed command installs from this checkout, since the project is on no package index."""
    (tmp_path / "faiss.py").write_text("raise ImportError('no faiss here')\n")
    status, errors = outcome(
        "search_r1/search/retrieval_server.py",
        *("--retriever_name", "e5", "--retriever_model", "hash"),
        path=f"{tmp_path}{os.pathsep}{SITE}",
    )
    assert status == 2
    assert errors.rstrip().endswith(f"install it: pip install -e '{ROOT}[dense]'")


def test_the_reranking_server_takes_the_originals_flags() -> None:
    """--reranking_topk is the server's --topk, with the same bound."""
    file = "search_r1/search/retrieval_rerank_server.py"
    status, errors = outcome(file, "--reranking_topk", "101", "--retrieval_topk", "20")
    assert (status, "--topk 101; expected --max_topk" in errors) == (2, True), errors


def test_the_module_retrieval_names_the_server() -> None:
    """It is not a program; run as one, it names the server instead of ending silently."""
    command = [sys.executable, "-m", "search_r1.search.retrieval"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "search_r1.search.retrieval_server" in done.stderr


def test_builders_run_as_files() -> None:
    """Data scripts and the index builder find the project by their own path."""
    for file in ("scripts/data_process/nq_search.py", "search_r1/search/index_builder.py"):
        status, errors = outcome(file, "--help")
        assert status == 0, errors


def test_the_migration_page_is_correct(capsys: pytest.CaptureFixture[str]) -> None:
    """The files on the page exist, and the flags that it calls the same are accepted."""
    page = (ROOT / "docs" / "start" / "migration.md").read_text(encoding="utf-8")
    rows = [row.split("|")[1:3] for row in page.splitlines() if row.startswith("| `")]
    scripts = [old if "same" in new else new for old, new in rows]
    for path in re.findall(
        r"`((?:scripts|search_r1|example)/[\w/]+\.(?:py|sh))", " ".join(scripts)
    ):
        assert (ROOT / path).is_file(), path
    programs = "".join(path.read_text() for path in (ROOT / "search_r1/search").glob("*_server.py"))
    helps = ""
    for main in (command.main, index_builder.main):
        with pytest.raises(SystemExit, match="0"):
            main(["--help-all"])
        helps += capsys.readouterr().out
    accepted = {
        flag.replace("-", "_").replace("__", "--", 1) for flag in re.findall(r"--[\w-]+", helps)
    }
    accepted |= {"--save_path", *re.findall(r'"(--\w+)"', programs)}
    flags = [flag for old, new in rows if "same" in new for flag in re.findall(r"`(--\w+)`", old)]
    assert len(flags) > 20 and set(flags) <= accepted
