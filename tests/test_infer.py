"""The command that asks one question: its messages, its JSON and its dialogue."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

import infer
from example.tiny import tiny_model

DOCUMENT = {"id": "1", "title": "Oslo", "text": "A city.", "contents": '"Oslo"\nA city.'}


class Handler(BaseHTTPRequestHandler):
    """A retriever that always finds the same."""

    def do_GET(self) -> None:
        self.reply({"status": "ok"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.reply({"result": [[{"document": DOCUMENT, "score": 1.0}] for _ in body["queries"]]})

    def reply(self, answer: object) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture(scope="module")
def retriever() -> Iterator[str]:
    """The address of a running retriever."""
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/retrieve"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model whose folder says how it was trained to talk."""
    folder = tiny_model(tmp_path_factory.mktemp("model"))
    (folder / "search_r1.json").write_text('{"template": "short", "max_turns": 1, "topk": 1}')
    return str(folder)


def test_json_is_one_object_with_the_whole_dialogue(
    model: str, retriever: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two turns for max_turns=1 of the checkpoint's settings, with the short template's words."""
    monkeypatch.setattr(infer.AgentConfig, "max_response_length", 5)
    assert infer.main(["Who?", "--model", model, "--retriever-url", retriever, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["question"] == "Who?"
    assert answer["status"] in {"answered", "out_of_turns"}
    assert answer["stats"]["turns"] <= 2
    observed = [s["text"] for s in answer["segments"] if s["origin"] == "observation"]
    assert observed == [infer.TEMPLATES["short"].invalid_action]


def test_the_dialogue_is_printed_before_the_outcome(
    model: str, retriever: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --json the segments come as they are made, the answer (or its lack) last."""
    monkeypatch.setattr(infer.AgentConfig, "max_response_length", 5)
    assert infer.main(["Who?", "--model", model, "--retriever-url", retriever]) == 0
    out = capsys.readouterr().out
    assert infer.TEMPLATES["short"].invalid_action.strip() in out
    assert out.strip().splitlines()[-1].startswith(("Answer:", "no answer"))


def test_no_retriever_is_one_message_and_code_2(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It names the address and the command that starts one."""
    assert infer.main(["Who?", "--model", model, "--retriever-url", "http://127.0.0.1:9"]) == 2
    error = capsys.readouterr().err
    assert "http://127.0.0.1:9" in error
    assert "bash retrieval_launch.sh" in error


def test_no_model_is_one_message_and_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the demo's checkpoint nor a given folder is there."""
    monkeypatch.chdir(tmp_path)
    for arguments in ([], ["--model", str(tmp_path / "none")]):
        assert infer.main(["Who?", *arguments]) == 2
        assert "make demo" in capsys.readouterr().err


def test_settings_come_from_the_checkpoint_or_are_the_defaults(model: str, tmp_path: Path) -> None:
    """A model of another make gets the paper's template."""
    assert infer.Settings.read(model) == infer.Settings("short", 1, 1)
    assert infer.Settings.read(str(tmp_path)).template == "search_r1"
