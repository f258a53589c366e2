"""Reranking: pairs of queries and documents, order of hits, and scores of a real cross-encoder."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    BertTokenizerFast,
)

from search_r1.retrieval.encoders.cross_encoder import CrossEncoder
from search_r1.retrieval.engines.base import Retriever, collect
from search_r1.retrieval.engines.rerank import RerankingRetriever
from search_r1.retrieval.errors import SetupError
from search_r1.retrieval.schema import Document, Hit, fingerprint
from search_r1.retrieval.settings import RerankConfig
from verl import hub_access

WORDS = "capital of france the danube river two cities is lies on city in passage about identical"
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS.split()]


class OwnDocuments:
    """A backend in which every query has different documents; the empty query has none."""

    name = "own"
    num_threads = 1
    num_documents = 100

    def __init__(self) -> None:
        self.requested: list[int] = []

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        self.requested.append(k)
        return [
            [Hit(Document.from_contents(f"{q}{i}", f"{q} of rank {i}"), -i) for i in range(k)]
            if q
            else []
            for q in queries
        ]

    def info(self) -> dict[str, Any]:
        return {"engine": self.name}


class ScriptedScorer:
    """Scores documents by their last word, or by a given table, and records the pairs."""

    def __init__(self, table: dict[str, float] | None = None) -> None:
        self.pairs: list[tuple[str, str]] = []
        self._table = table

    def scores(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        self.pairs.extend(pairs)
        if self._table is not None:
            return [self._table.get(document, 0.0) for _, document in pairs]
        return [float(document.split()[-1]) for _, document in pairs]

    def info(self) -> dict[str, Any]:
        return {"name": "scripted"}


def test_line_20_a_query_meets_its_own_documents_only() -> None:
    """In a batch, no query is paired with the documents of another query."""
    scorer = ScriptedScorer()
    retriever = RerankingRetriever(OwnDocuments(), scorer, retrieval_topk=4)
    queries = ["a", "", "b", "c", "a"]
    merged = retriever.search(queries, 2)
    assert all(document.startswith(query) for query, document in scorer.pairs)
    assert len(scorer.pairs) == 3 * 4, "equal pairs are scored once"
    assert merged == [retriever.search([query], 2)[0] for query in queries]
    assert [hit.document.id for hit in merged[2]] == ["b3", "b2"]
    assert [hit.score for hit in merged[2]] == [3.0, 2.0]
    assert merged[1] == []


def test_ties_stay_in_the_order_of_the_engine() -> None:
    """Documents with equal scores stay in the order of the backend."""
    scorer = ScriptedScorer({"q of rank 3": 1.0})
    hits = RerankingRetriever(OwnDocuments(), scorer, 5).search(["q"], 5)[0]
    assert [hit.document.id for hit in hits] == ["q3", "q0", "q1", "q2", "q4"]


@pytest.mark.parametrize(("k", "requested"), [(3, 10), (10, 10), (25, 25)])
def test_at_least_topk_documents_are_retrieved(k: int, requested: int) -> None:
    """The backend is asked for retrieval_topk documents, or for topk if that is more."""
    engine = OwnDocuments()
    hits = RerankingRetriever(engine, ScriptedScorer(), 10).search(["q"], k)
    assert (engine.requested, len(hits[0])) == ([requested], k)


def test_no_documents_score_nothing() -> None:
    """The scorer is not called without pairs."""
    scorer = ScriptedScorer()
    retriever = RerankingRetriever(OwnDocuments(), scorer, 3)
    assert retriever.search(["", ""], 3) == [[], []]
    assert retriever.search([], 3) == []
    assert scorer.pairs == []


def test_facts_and_stage() -> None:
    """The reranker changes the fingerprint, and its time is a stage of its own."""
    engine = OwnDocuments()
    retriever = RerankingRetriever(engine, ScriptedScorer(), 3)
    assert retriever.info()["rerank"] == {"retrieval_topk": 3, "name": "scripted"}
    assert fingerprint(retriever.info()) != fingerprint(engine.info())
    with collect() as seconds:
        retriever.search(["q"], 1)
    assert set(seconds) == {"rerank"}


@pytest.fixture
def make_reranker(tmp_path: Path) -> Callable[..., str]:
    """Return a function that saves a tiny random cross-encoder with `num_labels` outputs."""

    def make(num_labels: int = 1) -> str:
        torch.manual_seed(num_labels)
        sizes = BertConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=64,
            initializer_range=0.5,
            num_labels=num_labels,
        )
        folder = tmp_path / f"cross{num_labels}"
        BertForSequenceClassification(sizes).save_pretrained(folder)
        vocabulary = {word: i for i, word in enumerate(VOCABULARY)}
        BertTokenizerFast(vocabulary, model_max_length=64).save_pretrained(folder)
        return str(folder)

    return make


def by_formula(path: str, query: str, document: str) -> float:
    """Score one pair with transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.no_grad():
        logits = model(
            **tokenizer(query, document, truncation=True, max_length=64, return_tensors="pt")
        ).logits[0]
    return float(logits[0] if len(logits) == 1 else logits[1] - logits[0])


@pytest.mark.parametrize("num_labels", [1, 2])
def test_line_20_with_a_real_cross_encoder(
    make_reranker: Callable[..., str],
    open_engine: Callable[[str], Retriever],
    queries: list[str],
    num_labels: int,
) -> None:
    """Scores and order equal those of single queries and of transformers alone."""
    path, engine = make_reranker(num_labels), open_engine("bm25")
    config = RerankConfig(path, retrieval_topk=8, reranker_batch_size=3)
    retriever = RerankingRetriever(engine, CrossEncoder.open(config), config.retrieval_topk)
    merged = retriever.search(queries, 3)
    for query, hits in zip(queries, merged, strict=True):
        alone = retriever.search([query], 3)[0]
        assert [hit.document for hit in hits] == [hit.document for hit in alone]
        assert [hit.score for hit in hits] == pytest.approx([h.score for h in alone], abs=1e-5)
        documents = [hit.document for hit in engine.search([query], 8)[0]]
        scores = [by_formula(path, query, document.contents) for document in documents]
        assert [hit.score for hit in hits] == pytest.approx(
            sorted(scores, reverse=True)[:3], abs=1e-4
        )
        assert all(hit.document in documents for hit in hits)
    assert retriever.info()["rerank"]["name"] == f"cross{num_labels}"


def test_half_precision_reranker(
    make_reranker: Callable[..., str], open_engine: Callable[[str], Retriever]
) -> None:
    """A half-precision model works, and `info()` has its dtype."""
    config = RerankConfig(make_reranker(), reranker_dtype="bfloat16")
    retriever = RerankingRetriever(
        open_engine("bm25"), CrossEncoder.open(config), config.retrieval_topk
    )
    assert len(retriever.search(["capital"], 3)[0]) == 3
    assert retriever.info()["rerank"]["dtype"] == "bfloat16"


def test_a_missing_model_fails_fast_without_a_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the hub does not answer, loading fails at once, not after a request for each file."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub_access, "getproxies", dict)
    start = time.monotonic()
    with pytest.raises(SetupError, match=r"no-such/model.*127\.0\.0\.1 does not answer"):
        CrossEncoder.open(RerankConfig("no-such/model"))
    assert time.monotonic() - start < 5


def test_what_is_no_cross_encoder_is_refused(
    make_reranker: Callable[..., str], tmp_path: Path
) -> None:
    """A missing folder, a model without classifier, three outputs and bad options are errors."""
    path = make_reranker()
    with pytest.raises(SetupError, match="--reranker_model"):
        CrossEncoder.open(RerankConfig(str(tmp_path / "absent")))
    with pytest.raises(SetupError, match="3 outputs; expected a cross-encoder"):
        CrossEncoder.open(RerankConfig(make_reranker(3)))
    with pytest.raises(SetupError, match="--reranker_dtype"):
        CrossEncoder.open(RerankConfig(path, reranker_dtype="int4"))
    with pytest.raises(SetupError, match="--reranker_device"):
        CrossEncoder.open(RerankConfig(path, reranker_device="mars"))
    BertModel.from_pretrained(path).save_pretrained(path)
    with pytest.raises(SetupError, match=r"no weights for classifier\.bias"):
        CrossEncoder.open(RerankConfig(path))
