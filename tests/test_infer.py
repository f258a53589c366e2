"""`search-r1 infer`: its messages, its JSON and its terminal output."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

import infer
from search_r1.agent.tags import TEMPLATES
from search_r1.infer import QUESTION
from search_r1.inference import default_model
from tests.bad_models import whole_model

INVALID = TEMPLATES["short"].invalid_action
DOCUMENT = {"id": "1", "title": "Oslo", "text": "A city.", "contents": '"Oslo"\nA city.'}


class Handler(BaseHTTPRequestHandler):
    """A retriever that always returns the same document."""

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
        """Log nothing."""


@pytest.fixture(scope="module")
def retriever() -> Iterator[str]:
    """The address of a running retriever."""
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/retrieve"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model whose folder has dialogue settings."""
    folder = whole_model(tmp_path_factory.mktemp("model"))
    (folder / "search_r1.json").write_text('{"template": "short", "max_turns": 1, "topk": 1}')
    config = folder / "config.json"  # room for an endless answer
    config.write_text(config.read_text().replace(": 8192", ": 2097152"))
    return str(folder)


@pytest.fixture
def words(model: str, retriever: str) -> list[str]:
    """Options of a quick dialogue."""
    return ["--model", model, "--retriever-url", retriever, "--max-response-length", "5",
            "--device", "cpu", "--dtype", "float32"]  # fmt: skip


def test_a_dialogue_is_one_json_object_or_text_before_its_outcome(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """max_turns and template come from the model's settings."""
    assert infer.main(["Who?", *words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["question"] == "Who?"
    assert answer["status"] in {"answered", "out_of_turns"}
    assert answer["stats"]["turns"] <= 2
    observed = [s["text"] for s in answer["segments"] if s["origin"] == "observation"]
    assert observed == [INVALID]
    # Without --json the policy's text is printed first, the answer or its absence last.
    turns = [s["text"] for s in answer["segments"]][::2]
    assert infer.main(["Who?", *words]) == 0
    out = capsys.readouterr().out
    assert turns[0].strip() in out
    assert out.index(turns[0].strip()) < out.index(INVALID.strip())
    assert out.strip().splitlines()[-1].startswith(("Answer:", "no answer"))


def test_a_file_of_questions_is_answered_in_order(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line per question goes to a file or standard output, and progress to standard error."""
    questions, out = tmp_path / "questions.txt", tmp_path / "new" / "answers.jsonl"
    questions.write_text("Who?\nWhere?\n")
    asked = ["--file", str(questions)]
    assert infer.main([*asked, *words, "--out", str(out)]) == 0
    assert "2/2" in capsys.readouterr().err
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["uid"], line["question"]) for line in lines] == [
        ("questions.txt#0", "Who?"),
        ("questions.txt#1", "Where?"),
    ]
    assert infer.main([*asked, *words]) == 0
    assert capsys.readouterr().out == out.read_text()


def test_no_retriever_is_one_message_and_code_2(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names the address and the command that starts a server; no file is left."""
    words = ["--model", model, "--retriever-url", "http://127.0.0.1:9"]
    assert infer.main(["Who?", *words]) == 2
    error = capsys.readouterr().err
    assert "http://127.0.0.1:9" in error
    assert "bash retrieval_launch.sh" in error
    questions, out = tmp_path / "questions.txt", tmp_path / "answers.jsonl"
    questions.write_text("Who?")
    assert infer.main(["--file", str(questions), *words, "--out", str(out)]) == 2
    assert not out.exists()


def test_no_model_is_one_message_and_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Covers missing demo and shipped models, a missing folder, and a folder without an adapter."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(default_model, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    for arguments, expected in (
        ([], "make demo"),
        (["--model", str(tmp_path / "none")], "a Hugging Face model"),
        (["--adapter", str(tmp_path)], "adapter_config.json"),
        (["--adapter", "a", "--model", "m", "--endpoint", "http://x"], "one of them"),
    ):
        assert infer.main(["Who?", *arguments, "--retriever-url", "empty"]) == 2
        assert expected in capsys.readouterr().err


def test_without_a_question_the_default_one_is_asked(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Like the original's `python infer.py` without arguments; the question is in the output."""
    assert infer.main(words) == 0
    assert QUESTION in capsys.readouterr().out


@pytest.mark.slow
def test_a_conversation_outlives_ctrl_c(model: str) -> None:
    """The real program, interrupted in an endless answer, still accepts the next command."""
    words = ["--interactive", "--model", model, "--retriever-url", "empty", "--device", "cpu",
             "--dtype", "float32", "--max-response-length", "1000000",
             "--max-prompt-length", "1000000"]  # fmt: skip
    root = Path(infer.__file__).parent
    with subprocess.Popen(
        [sys.executable, "-u", str(root / "infer.py"), *words],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(root)},
    ) as program:  # fmt: skip
        try:
            assert program.stdin is not None and program.stdout is not None
            assert "/quit ends" in program.stdout.readline()
            program.stdin.write("Who?\n")
            program.stdin.flush()
            assert program.stdout.read(3)  # "> ", then the first word of an endless answer
            program.send_signal(signal.SIGINT)
            rest, _ = program.communicate("/quit\n", timeout=120)
        finally:
            program.kill()
    assert "stopped" in rest
    assert program.returncode == 0
