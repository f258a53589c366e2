"""The agent server as a process: a real model, its port, shutdown, and user errors."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from search_r1 import serve
from tests.bad_models import whole_model

ROOT = Path(serve.__file__).parents[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model whose settings name the short template."""
    folder = whole_model(tmp_path_factory.mktemp("model"), hidden_size=128)
    (folder / "search_r1.json").write_text('{"template": "short", "max_turns": 1, "topk": 1}')
    return str(folder)


def wait_for(file: Path, program: subprocess.Popen[bytes]) -> str:
    """Wait until the program has written the file and return its text."""
    deadline = time.monotonic() + 300
    while not (file.is_file() and file.read_text()):
        assert program.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    return file.read_text().strip()


@contextmanager
def served(model: str, folder: Path, *words: str) -> Iterator[openai.OpenAI]:
    """Serve a model in a process, which must end with status 0 at SIGTERM."""
    port_file = folder / "port"
    command = [
        sys.executable, "-m", "search_r1.serve", "--model", model, "--retriever-url", "empty",
        "--device", "cpu", "--dtype", "float32", "--port", "0", "--port-file", str(port_file),
        *words,
    ]  # fmt: skip
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}) as program:
        try:
            url = f"http://127.0.0.1:{wait_for(port_file, program)}/v1"
            yield openai.OpenAI(base_url=url, api_key="none", max_retries=0)
            program.send_signal(signal.SIGTERM)
            assert program.wait(120) == 0
        finally:
            program.kill()


def test_a_real_model_is_served_until_it_is_told_to_end(model: str, tmp_path: Path) -> None:
    """Greedy whole and streamed answers agree, and SIGTERM ends the server with exit status 0."""
    with served(
        model, tmp_path, "--engine", "transformers", "--max-response-length", "5"
    ) as client:
        (name,) = [one.id for one in client.models.list()]
        messages = [{"role": "user", "content": "Who?"}]
        whole = client.chat.completions.create(model=name, messages=messages)  # type: ignore[arg-type]
        parts = client.chat.completions.create(model=name, messages=messages, stream=True)  # type: ignore[arg-type, call-overload]
        deltas = [part.choices[0].delta for part in parts]
    message = whole.choices[0].message
    assert message.search_r1["status"] in {"answered", "out_of_turns"}
    assert 0 < whole.usage.completion_tokens <= 10
    reasoning = "".join(getattr(delta, "reasoning_content", "") for delta in deltas)
    assert reasoning == message.reasoning_content != ""
    assert deltas[-1].search_r1 == message.search_r1


def test_mistakes_are_one_message_and_code_2(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Covers a port in use and an unavailable retriever."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert serve.main(["--model", model, "--port", port]) == 2
    assert "another --port" in capsys.readouterr().err
    words = ["--model", model, "--port", "0", "--retriever-url", "http://127.0.0.1:9"]
    assert serve.main(words) == 2
    assert "bash retrieval_launch.sh" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.vllm_cpu
def test_vllm_serves_many_at_once_and_says_words_as_they_come(model: str, tmp_path: Path) -> None:
    """Sixteen concurrent streams equal the answers of single requests, and come in pieces."""
    words = ("--max-response-length", "12", "--max-prompt-length", "1000")
    with served(model, tmp_path, *words) as client:
        streams = [
            client.chat.completions.create(
                model="search-r1", stream=True, messages=[{"role": "user", "content": f"{n}?"}]
            )
            for n in range(16)
        ]
        streamed = [[getattr(c.choices[0].delta, "reasoning_content", "") for c in stream]
                    for stream in streams]  # fmt: skip
        for n, pieces in enumerate(streamed):
            alone = client.chat.completions.create(
                model="search-r1", messages=[{"role": "user", "content": f"{n}?"}]
            )
            assert "".join(pieces) == alone.choices[0].message.reasoning_content
            assert len([piece for piece in pieces if piece]) > 4
