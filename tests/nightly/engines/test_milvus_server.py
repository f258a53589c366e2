"""Our retrieval server over a real Milvus server: filled, compared, killed, trained with.

`make test-engines`. Without CORPUS_PATH, which names real passages, only the example world is
filled. Vectors are those of the encoder `hash`, since a model would encode for minutes.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scripts.demo import COMMON
from search_r1.retrieval.client import RetrievalClient
from search_r1.retrieval.corpus import Corpus
from search_r1.retrieval.engines.base import Retriever
from search_r1.retrieval.engines.registry import build_retriever
from search_r1.retrieval.errors import UpstreamRefused
from search_r1.retrieval.index_builder import BuildConfig, build_index
from search_r1.retrieval.local_server import LocalServer
from search_r1.retrieval.schema import Hit
from search_r1.retrieval.settings import EncoderConfig, RetrieverConfig
from tests.retrieval.with_fields import (
    FILTERS,
    NAMES,
    QUERIES,
    best_left,
    filter_of,
    is_left,
    write_with_fields,
)

milvus_server = pytest.importorskip("tests.nightly.engines.milvus_server")
pytest.importorskip("milvus", reason="the server's wheel is missing: pip install milvus==2.3.5")

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "example" / "corpus.jsonl"
REAL = Path(os.environ.get("CORPUS_PATH", ""))
CORPORA = {"example": EXAMPLE} | ({"real": REAL} if REAL.is_file() else {})
NUM_QUERIES, NUM_CLIENTS, TOPK = 2000, 64, 3
SAME = 1e-5
"""Scores that differ by less are equal: they are summed in another order."""
MODEL = "hash:384"
ENCODER = EncoderConfig(MODEL)


@dataclass(frozen=True)
class Filled:
    """A collection, the queries about its passages, and the hits of an exact search."""

    uri: str
    corpus: Path
    queries: list[str]
    exact: dict[str, list[Hit]]
    local: Retriever


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with milvus_server.MilvusServer(tmp_path_factory.mktemp("milvus")) as server:
        yield server


@pytest.fixture(scope="module", params=list(CORPORA))
def filled(
    request: pytest.FixtureRequest, server: Any, tmp_path_factory: pytest.TempPathFactory
) -> Filled:
    """Fill a collection by the command, which is killed once, and search it exactly with FAISS."""
    corpus = CORPORA[request.param]
    uri, folder = server.uri(request.param), tmp_path_factory.mktemp(request.param)
    fill(corpus, uri, kill_after=10.0 if request.param == "real" else None)
    seconds = fill(corpus, uri)
    rows = Corpus.open(corpus)
    print(f"{len(rows)} passages filled, the last run in {seconds:.1f} s")  # noqa: T201
    start = time.monotonic()
    build_index(BuildConfig("e5", str(corpus), str(folder), model_path=MODEL))
    print(f"{len(rows)} passages in FAISS, {time.monotonic() - start:.1f} s")  # noqa: T201
    local = build_retriever(RetrieverConfig("e5", str(corpus), str(folder), encoder=ENCODER))
    queries = questions(rows)
    exact = dict(zip(queries, local.search(queries, TOPK + 20), strict=True))
    return Filled(uri, corpus, queries, exact, local)


def fill(corpus: Path, uri: str, kill_after: float | None = None) -> float:
    """Run `search-r1 index`, perhaps until it is killed; return its seconds."""
    command = [
        sys.executable, "-m", "search_r1.cli", "index", "--corpus_path", str(corpus),
        "--retrieval_method", "e5", "--model_path", MODEL, "--to", uri,
    ]  # fmt: skip
    start = time.monotonic()
    with subprocess.Popen(command, cwd=ROOT) as filler:
        try:
            assert filler.wait(kill_after) == 0
        except subprocess.TimeoutExpired:
            filler.send_signal(signal.SIGKILL)
    return time.monotonic() - start


def questions(corpus: Corpus) -> list[str]:
    """Return different queries: titles and first words of passages."""
    rows = random.Random(0).sample(range(len(corpus)), min(NUM_QUERIES, len(corpus)))
    texts = (" ".join([d.title, *d.text.split()[:8]]) for d in corpus.documents(rows))
    return list(dict.fromkeys(texts))


def is_right(documents: list[Any], exact: list[Hit]) -> bool:
    """Whether they are the best, in whatever order of those whose scores are equal."""
    scores = {hit.document.id: hit.score for hit in exact}
    found = [scores.get(document.id) for document in documents]
    best = [hit.score for hit in exact[:TOPK]]
    return len(found) == len(best) and all(
        score is None or abs(score - expected) < SAME
        for score, expected in zip(found, best, strict=True)
    )


def test_the_collection_answers_as_exact_search(filled: Filled) -> None:
    """Every query; scores too."""
    remote = build_retriever(
        RetrieverConfig("milvus", str(filled.corpus), filled.uri, encoder=ENCODER)
    )
    timed = {"FAISS": search_all(filled.local, filled), "Milvus": search_all(remote, filled)}
    for engine, (seconds, _) in timed.items():
        print(f"{engine}: {len(filled.queries) / seconds:.0f} queries/s")  # noqa: T201
    for query, hits in zip(filled.queries, timed["Milvus"][1], strict=True):
        exact = filled.exact[query]
        expected = [hit.score for hit in exact[:TOPK]]
        assert [hit.score for hit in hits] == pytest.approx(expected, abs=SAME)
        assert is_right([hit.document for hit in hits], exact), query


def test_filters_are_those_of_exact_search(server: Any, tmp_path: Path) -> None:
    """Of every type of value; the array of keys exists from Milvus 2.3 on."""
    rows = write_with_fields(tmp_path / "corpus.jsonl")
    corpus, uri = str(tmp_path / "corpus.jsonl"), server.uri("fields")
    build_index(BuildConfig("e5", corpus, to=uri, model_path=MODEL, filter_fields=NAMES))
    engine: Any = build_retriever(RetrieverConfig("milvus", None, uri, encoder=ENCODER))
    for value in FILTERS:
        found = engine.filtered(filter_of(value)).search(QUERIES, TOPK)
        for hits, best in zip(found, best_left(engine, rows, value, TOPK), strict=True):
            expected = [hit.score for hit in best]
            assert [hit.score for hit in hits] == pytest.approx(expected, abs=SAME), value
            left = {row["id"] for row in rows if is_left(row, value)}
            assert {hit.document.id for hit in hits} <= left, value


def search_all(engine: Retriever, filled: Filled) -> tuple[float, list[list[Hit]]]:
    """Return the seconds that all queries take in batches of 64, and their hits."""
    start = time.monotonic()
    batches = [filled.queries[i : i + 64] for i in range(0, len(filled.queries), 64)]
    hits = [found for batch in batches for found in engine.search(batch, TOPK)]
    return time.monotonic() - start, hits


def serve(uri: str) -> LocalServer:
    return LocalServer(
        ["--retriever_name", "milvus", "--index_path", uri, "--retriever_model", MODEL,
         "--cache_entries", "0", "--online_timeout", "5"]
    )  # fmt: skip


@pytest.mark.parametrize("filled", list(CORPORA)[-1:], indirect=True)
def test_a_killed_server_gives_no_wrong_answer(server: Any, filled: Filled) -> None:
    """64 clients wait while it is down and loads, and every answer is that of exact search."""
    wrong: list[str] = []
    count = 0

    async def run(url: str) -> None:
        nonlocal count
        is_over = asyncio.Event()

        async def search(client: RetrievalClient, number: int) -> None:
            nonlocal count
            draw = random.Random(number)
            while not is_over.is_set():
                query = draw.choice(filled.queries)
                if not is_right(await client.search(query), filled.exact[query]):
                    wrong.append(query)
                count += 1

        async with (
            RetrievalClient(url, TOPK, max_retries=100, max_backoff=2.0) as client,
            asyncio.TaskGroup() as group,
        ):
            for i in range(NUM_CLIENTS):
                group.create_task(search(client, i))
            await asyncio.sleep(5)
            before = count
            await asyncio.to_thread(server.kill)
            await asyncio.sleep(2)
            seconds = await asyncio.to_thread(server.start)
            restarted = count
            while count < restarted + 1000:
                await asyncio.sleep(0.5)
            is_over.set()
        print(f"{before} answers, killed, up in {seconds:.0f} s, {count} in all")  # noqa: T201

    with serve(filled.uri) as retriever:
        asyncio.run(run(retriever.url))
    assert not wrong and count > 1000


def test_a_policy_is_trained_over_it(server: Any, tmp_path: Path, ray_folder: Path) -> None:
    """Two steps of GRPO with the example's tiny policy, whose searches are answered."""
    uri = server.uri("example")
    fill(EXAMPLE, uri)
    out, data = tmp_path / "out", ROOT / "example" / "data"
    with serve(uri) as retriever:
        command = [
            sys.executable, "-m", "verl.trainer.main_ppo", *COMMON, "trainer.device=cpu",
            f"data.train_files={data}/train.parquet", f"data.val_files={data}/val.parquet",
            "data.train_batch_size=4", "actor_rollout_ref.rollout.n_agent=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=16", "trainer.total_training_steps=2",
            "trainer.val_before_train=false", "trainer.test_freq=-1",
            "actor_rollout_ref.rollout.cpu_kv_cache_gib=1",
            f"actor_rollout_ref.model.path={ROOT}/example/policy",
            f"retriever.url={retriever.url}", f"trainer.default_local_dir={out}",
        ]  # fmt: skip
        env = os.environ | {"RAY_TMPDIR": str(ray_folder)}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [step["env/searches"] > 0 for step in steps] == [True, True]


def test_a_wrong_token_is_refused(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a server that wants none it is ignored; it is in no message."""
    monkeypatch.setenv("INDEX_TOKEN", "root:secret")
    settings = RetrieverConfig("milvus", None, server.uri("none"), encoder=ENCODER)
    with pytest.raises(Exception) as caught:
        build_retriever(settings)
    assert not isinstance(caught.value, UpstreamRefused) and "secret" not in str(caught.value)
