"""Complete training runs whose retriever fails, hangs, is killed, and restarts or does not."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from example.model import load_tokenizer
from example.tiny import tiny_llama
from search_r1.retrieval.local_server import LocalServer
from tests.test_end_to_end import ROOT, command_of, metrics, train, write_rows

pytestmark = [pytest.mark.slow, pytest.mark.vllm_cpu]

COUNTRIES = ("France", "Japan", "India", "China", "Spain", "Italy")
NEXT = {
    "<": ("search",),
    "search": (">",),
    ">": COUNTRIES,
    "</": ("search",),
    **dict.fromkeys(COUNTRIES, ("</",)),
}
"""Tokens that may follow a token, equally likely; `<` follows any token not listed here."""
OPTIONS = (
    "algorithm.adv_estimator=gae", "critic.optim.lr=1e-4", "actor_rollout_ref.actor.optim.lr=1e-4",
    "trainer.n_gpus_per_node=1", "trainer.total_training_steps=4", "trainer.test_freq=2",
    "trainer.save_freq=0",
    "retriever.max_retries=3", "retriever.timeout=3",
)  # fmt: skip
"""Options of every run in this file."""
FAULTS = ("--inject_failures", "0.2", "--inject_hangs", "0.05", "--inject_seed", "3")
IGNORED_METRICS = (
    "timing_s/", "perf/", "fault/", "val/fault/", "rollout/wait_s/", "rollout/prefix_hit_share",
)  # fmt: skip
"""Prefixes of metrics that depend on the machine or on the injected faults."""


def searching_model(folder: Path) -> str:
    """Save a model that does nothing but search for a random country; return its folder."""
    tokenizer = load_tokenizer()
    model = tiny_llama(tie_word_embeddings=False, eos_token_id=tokenizer.eos_token_id)
    states = {tokenizer.convert_tokens_to_ids(t): i for i, t in enumerate(NEXT, start=1)}
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        embedding.zero_()[:, 0] = 1.0
        head.zero_()[tokenizer.convert_tokens_to_ids("<"), 0] = 2.0
        for (token, followers), (token_id, state) in zip(NEXT.items(), states.items(), strict=True):
            assert tokenizer.convert_ids_to_tokens(token_id) == token
            embedding[token_id] = torch.nn.functional.one_hot(torch.tensor(state), 128).float()
            for follower in followers:
                head[tokenizer.convert_tokens_to_ids(follower), state] = 2.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def retriever(folder: Path, *flags: str) -> LocalServer:
    """Return a retrieval server over the example corpus, not yet started; it keeps its port."""
    corpus = folder / "corpus.jsonl"
    if not corpus.exists():
        corpus.write_bytes((ROOT / "example" / "corpus.jsonl").read_bytes())
    return LocalServer(["--corpus_path", str(corpus), "--retriever_name", "bm25", *flags])


def searching_world(folder: Path, answer: str = "a") -> dict[str, str]:
    """Create a model that searches and prompt rows for it, all with the same gold answer."""
    write_rows(folder / "rows.parquet", answer)
    model = searching_model(folder / "model")
    return {"model": model, "rows": str(folder / "rows.parquet"), "folder": str(folder)}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A model that searches and its prompt rows; each run starts its own retriever."""
    return searching_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def undisturbed(world: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose retriever is always available."""
    out = tmp_path_factory.mktemp("undisturbed")
    with retriever(Path(world["folder"])) as server:
        train({**world, "url": server.url}, out, *OPTIONS)
    return out


@contextmanager
def started(world: dict[str, str], out: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a run whose output goes to `out/log`."""
    out.mkdir(exist_ok=True)
    with (out / "log").open("ab") as log:
        command = command_of(world, out, *OPTIONS, *options)
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(60)


def wait_for(condition: Callable[[], bool], run: subprocess.Popen[bytes], out: Path) -> None:
    """Wait until the condition holds; fails if the run ends before."""
    limit = time.monotonic() + 400
    while not condition():
        assert run.poll() is None and time.monotonic() < limit, (out / "log").read_text()[-4000:]
        time.sleep(0.05)


def has_step_one(out: Path) -> bool:
    return (out / "metrics.jsonl").exists() and any(row["step"] == 1 for row in metrics(out))


def compare(out: Path, undisturbed: Path) -> list[dict[str, Any]]:
    """Check that every metric equals that of the undisturbed run; return the metrics."""
    rows, expected = metrics(out), metrics(undisturbed)
    assert [row["step"] for row in rows] == [row["step"] for row in expected] == [0, 1, 2, 3, 4]
    for actual, reference in zip(rows, expected, strict=True):
        names = {name for name in actual | reference if not name.startswith(IGNORED_METRICS)}
        for name in names:
            assert actual[name] == pytest.approx(reference[name], rel=1e-3, abs=1e-5), name
    return rows


def test_line_19_a_run_survives_failures_of_its_retriever(
    world: dict[str, str], undisturbed: Path, tmp_path: Path
) -> None:
    """20 % errors, 5 % hangs, a kill and a restart leave all training metrics unchanged."""
    assert all(row["env/valid_searches"] == 1.0 for row in metrics(undisturbed) if row["step"])
    out, server = tmp_path / "run", retriever(Path(world["folder"]), *FAULTS)
    with server, started({**world, "url": server.url}, out) as run:
        wait_for(lambda: has_step_one(out), run, out)
        server.kill()
        wait_for(lambda: "the run waits for up to" in (out / "log").read_text(), run, out)
        server.start()
        run.wait(400)
    assert run.returncode == 0
    rows = compare(out, undisturbed)
    total = {name: sum(row.get(name, 0.0) + row.get(f"val/{name}", 0.0) for row in rows)
             for name in rows[-1] if name.startswith("fault/")}  # fmt: skip
    assert total["fault/outage_s"] > 0 and total["fault/trajectories_dropped"] == 0
    for name in ("searches_failed", "searches_retried", "trajectories_resampled"):
        assert total[f"fault/{name}"] > 0
