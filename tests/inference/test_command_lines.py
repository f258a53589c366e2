"""Invalid command lines of the agent: one line and exit status 2 before any model is loaded."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from search_r1 import infer, serve
from search_r1.inference import batch, model
from search_r1.inference.dialogue import AgentSession
from tests.fakes import ScriptedEngine
from tests.inference.scripted import TWO_SEARCHES, session
from verl.files import exclusive_lock

BASE = ["--model", "/nowhere", "--retriever-url", "empty"]
AGENT = [
    ["--endpoint", ""], ["--endpoint", "ftp://host"], ["--endpoint", "host:8000"],
    ["--endpoint", "http://a b/"], ["--api-key-env", "KEY"], ["--served-model", " "],
    ["--endpoint", "http://"], ["--endpoint", "http://host:99999"], ["--served-model", "x"],
    ["--engine", "transformers", "--tensor-parallel-size", "2"],
    ["--endpoint", "http://host", "--tensor-parallel-size", "2"],
    ["--endpoint", "http://host", "--adapter", "a"], ["--temperature", "nan"], ["--top-p", "0"],
    ["--topk", "0"], ["--max-turns", "-1"], ["--seed", "-1"], ["--concurrency", "inf"],
    ["--max-prompt-length", "2000000000"], ["--concurrency", "2000000000"],
    ["--max-turns", "2000000000"], ["--topk", "2000000000"], ["--max-obs-length", "2000000000"],
    ["--retriever-url", ""], ["--retriever-url", "ftp://host"], ["--device", "mars"],
]  # fmt: skip
ASKED = [[""], [" \n"], ["a", "--interactive"], ["--file", "f", "--out", "f"], ["--out", "f"],
         ["--file", "f", "--out", "./f"], ["a", "--json", "--show-documents"],
         ["--file", "f", "--show-documents"], ["a", "--file", "f"],
         ["--interactive", "--json"]]  # fmt: skip
SERVED = [["--name", ""], ["--name", "a\nb"], ["--name", "\x1b[2J"], ["--host", ""],
          ["--host", "ü" * 80], ["--port", "70000"], ["--port-file", "/nowhere/port"],
          ["--port-file", "/tmp"], ["--max-body-bytes", "1"]]  # fmt: skip


@pytest.mark.parametrize(
    ("module", "words"),
    [(module, words) for module in (infer, serve) for words in AGENT]
    + [(infer, words) for words in ASKED]
    + [(serve, ["--port", "0", *words]) for words in SERVED],
)
def test_what_cannot_work(
    module: object, words: list[str], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The message says what is expected."""

    def never(*_: object) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(model, "open_model_folder", never)
    main = module.main  # type: ignore[attr-defined]
    try:
        status = main([*BASE, *words])
    except SystemExit as ended:
        status = ended.code
    error = capsys.readouterr().err
    assert status == 2 and "Traceback" not in error
    assert "expected" in error or "invalid choice" in error


@pytest.mark.parametrize("out", ["", "no/such/../file/x", "/proc/nowhere/x"])
def test_answers_that_could_not_be_written(out: str, tmp_path: Path) -> None:
    """An output path that cannot be written is refused before the model is loaded."""
    (tmp_path / "file").touch()
    questions = tmp_path / "questions.txt"
    questions.write_text("Who?\n")
    words = [*BASE, "--file", str(questions), "--out", str(tmp_path / out)]
    assert infer.main(words) == 2


def test_a_full_disk_ends_a_file_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no traceback, although writing fails within a task group."""

    @contextlib.asynccontextmanager
    async def scripted(_: object) -> AsyncIterator[AgentSession]:
        yield session(ScriptedEngine(TWO_SEARCHES * 3))

    monkeypatch.setattr(batch, "open_session", scripted)
    questions = tmp_path / "questions.txt"
    questions.write_text("Who?\nWhere?\n")
    assert infer.main([*BASE, "--file", str(questions), "--out", "/dev/full"]) == 2
    error = capsys.readouterr().err
    assert "--out /dev/full: got [Errno 28]" in error and "Traceback" not in error


def test_answers_of_two_runs_never_mix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only one run may write to a file at a time; devices such as /dev/null are not locked."""

    @contextlib.asynccontextmanager
    async def scripted(_: object) -> AsyncIterator[AgentSession]:
        yield session(ScriptedEngine(TWO_SEARCHES))

    monkeypatch.setattr(batch, "open_session", scripted)
    questions, out = tmp_path / "questions.txt", tmp_path / "new" / "answers.jsonl"
    questions.write_text("Who?\n")
    words = [*BASE, "--file", str(questions), "--out"]
    with exclusive_lock(out, "", lock=out):
        out.write_text("other answers")
        assert infer.main([*words, str(out)]) == 2
        assert "which another run is writing to" in capsys.readouterr().err
        assert out.read_text() == "other answers"
    assert infer.main([*words, str(out)]) == 0 and "Oslo" in out.read_text()
    with exclusive_lock(Path("/dev/null"), "", lock=Path("/dev/null")):
        assert infer.main([*words, "/dev/null"]) == 0


def test_a_link_to_the_questions_is_not_written_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hard links, symbolic links and circular links are recognised."""
    questions, soft, hard = (tmp_path / name for name in ("q.txt", "soft", "hard"))
    questions.write_text("Who?\n")
    soft.symlink_to(questions)
    hard.hardlink_to(questions)
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    for file, out in ((questions, soft), (questions, hard), (tmp_path / "a", tmp_path / "o")):
        assert infer.main([*BASE, "--file", str(file), "--out", str(out)]) == 2
        error = capsys.readouterr().err
        assert "expected" in error and "Traceback" not in error
    assert questions.read_text() == "Who?\n"


def test_a_gpu_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing GPU is reported before the model is loaded."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("verl.hub_access.hub_problem", str)
    words = ["--model", "org/name", "--device", "cuda", "--dtype", "float32", "a"]
    assert infer.main([*BASE, *words]) == 2
    assert "--device: got cuda" in capsys.readouterr().err
