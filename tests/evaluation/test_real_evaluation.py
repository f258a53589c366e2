"""Real evaluations: vLLM with a tiny model, a running retriever, the command line."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from example.tiny import tiny_model
from search_r1.retrieval.local_server import LocalServer
from verl.ports import free_port
from verl.rollout.vllm_settings import CPU_ENV, QUIET_ENV

pytestmark = pytest.mark.vllm_cpu

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A tiny random model, six rows of two sets, and a BM25 server over the example corpus."""
    folder = tmp_path_factory.mktemp("world")
    corpus = folder / "corpus.jsonl"
    corpus.write_bytes((ROOT / "example" / "corpus.jsonl").read_bytes())
    rows = [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": f"Question: How large is Norway {i}?"}],
            "reward_model": {"ground_truth": {"target": ["Norway"]}},
        }
        for i in range(3)
        for source in ("nq", "hotpotqa")
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with LocalServer(["--corpus_path", str(corpus), "--retriever_name", "bm25"]) as server:
        yield {
            "model": str(tiny_model(folder / "model")),
            "data": str(folder / "rows.jsonl"),
            "url": server.url,
        }


def run(world: dict[str, str], out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a subprocess."""
    command = [
        sys.executable, "-m", "search_r1.evaluate", "--model", world["model"],
        "--data", world["data"], "--retriever-url", world["url"], "--out", str(out),
        "--template", "short", "--max-turns", "1", "--max-response-length", "12",
        "--max-obs-length", "128", "--max-prompt-length", "512", "--dtype", "float32", *options,
    ]  # fmt: skip
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)


def evaluate(world: dict[str, str], out: Path, *options: str) -> list[dict[str, Any]]:
    """Run an evaluation that must succeed, and return its samples."""
    done = run(world, out, *options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert "| EM |" in done.stdout
    return [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_vllm_and_transformers_evaluate_alike(world: dict[str, str], tmp_path: Path) -> None:
    """Two engines in float32 give the same greedy dialogues for every row."""
    ours = evaluate(world, tmp_path / "vllm")
    assert sorted(s["uid"] for s in ours) == [f"rows.jsonl#{i}" for i in range(6)]
    theirs = evaluate(world, tmp_path / "transformers", "--engine", "transformers")
    by_uid = {s["uid"]: s["dialogue"] for s in theirs}
    assert {s["uid"]: s["dialogue"] for s in ours} == by_uid
    manifest = json.loads((tmp_path / "vllm" / "manifest.json").read_text())
    assert manifest["retriever"]["corpus"]["count"] == 4099
    assert list(manifest["model"]["files"]) == ["config.json", "model.safetensors"]


@pytest.mark.slow
def test_rag_reads_what_the_server_finds(world: dict[str, str], tmp_path: Path) -> None:
    """RAG puts the question's documents into the prompt; a finished evaluation is not repeated."""
    options = ("--method", "rag", "--engine", "transformers")
    samples = evaluate(world, tmp_path / "rag", *options)
    assert all("Norway" in s["dialogue"][0][1].split("<information>")[1] for s in samples)
    assert all(s["searches"][0]["has_answer"] for s in samples)
    assert evaluate(world, tmp_path / "rag", *options) == samples


@contextlib.contextmanager
def served(model: str, log: Path) -> Iterator[str]:
    """Serve a model with vLLM's own server and provide its address."""
    port = free_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host",
        "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "1024",
        "--served-model-name", "policy", "--enforce-eager", "--no-enable-chunked-prefill",
        "--max-num-batched-tokens", "8192",
    ]  # fmt: skip
    environment = {**os.environ, **QUIET_ENV, **CPU_ENV, "VLLM_CPU_KVCACHE_SPACE": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out)
        try:
            url = f"http://127.0.0.1:{port}"
            while not answers(url):
                assert process.poll() is None, log.read_text()[-3000:]
                time.sleep(1)
            yield url
        finally:
            process.terminate()
            process.wait(60)


def answers(url: str) -> bool:
    """Whether the server is ready."""
    try:
        return httpx.get(f"{url}/health", timeout=2).is_success
    except httpx.TransportError:
        return False


@pytest.mark.slow
def test_an_endpoint_evaluates_as_the_engine_in_process(
    world: dict[str, str], tmp_path: Path
) -> None:
    """Dialogues through vLLM's server equal those of the in-process engine."""
    ours = evaluate(world, tmp_path / "ours", "--engine", "transformers")
    with served(world["model"], tmp_path / "vllm.log") as url:
        theirs = evaluate(world, tmp_path / "served", "--endpoint", url,
                          "--served-model", "policy")  # fmt: skip
    dialogues = {s["uid"]: s["dialogue"] for s in theirs}
    assert dialogues == {s["uid"]: s["dialogue"] for s in ours}


@pytest.mark.slow
def test_a_judge_that_cannot_judge_is_refused_at_once(
    world: dict[str, str], tmp_path: Path
) -> None:
    """A judge that gives no verdict is refused before any dialogue runs."""
    with served(world["model"], tmp_path / "judge.log") as url:
        done = run(world, tmp_path / "out", "--engine", "transformers",
                   "--judge-url", f"{url}/v1", "--judge-model", "policy")  # fmt: skip
    assert done.returncode == 2
    assert "--judge-url: got no verdict from http" in done.stderr
    assert not (tmp_path / "out" / "samples.jsonl").exists()
