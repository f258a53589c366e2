"""A hybrid joins its engines' rankings as the formula says, over one corpus."""

from dataclasses import replace
from typing import Any

import pytest

from search_r1.retrieval.corpus import Corpus
from search_r1.retrieval.encoder import HashEncoder
from search_r1.retrieval.engines.registry import build_retriever
from search_r1.retrieval.errors import SetupError
from search_r1.retrieval.index_builder import BuildConfig, build_index
from search_r1.retrieval.settings import EncoderConfig, FusionConfig, RetrieverConfig

pytest.importorskip("faiss")
QUERIES = ["calling code of France", "ISO number of Austria", "zebra", "capital city", "?"]

ROWS = {document.id: row for row, document in enumerate(Corpus.open("example/corpus.jsonl"))}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RetrieverConfig:
    """Both indexes in one folder, by one command."""
    corpus, folder = "example/corpus.jsonl", tmp_path_factory.mktemp("index")
    assert build_index(BuildConfig("bm25+bag", corpus, str(folder), "hash:32")) == folder
    return RetrieverConfig("bm25+bag", corpus, str(folder), encoder=EncoderConfig("hash:32"))


def expected(config: RetrieverConfig, query: str, k: int) -> list[tuple[str, float]]:
    """Return ids and scores of the fusion, by loops over the engines' own searches."""
    fusion = config.fusion
    totals: dict[str, float] = {}
    for name, weight in zip(config.retriever_name.split("+"), fusion.fusion_weights, strict=True):
        part = build_retriever(replace(config, retriever_name=name, fusion=FusionConfig()))
        hits = part.search([query], max(k, fusion.fusion_depth))[0]
        for rank, hit in enumerate(hits if any(hit.score for hit in hits) else [], 1):
            value = 1 / (60 + rank)
            if fusion.fusion == "scores":
                span = hits[0].score - hits[-1].score
                value = (hit.score - hits[-1].score) / span if span else 1.0
            totals[hit.document.id] = totals.get(hit.document.id, 0.0) + weight * value
    return sorted(totals.items(), key=lambda item: (-item[1], ROWS[item[0]]))[:k]


@pytest.mark.parametrize(
    ("fusion", "k"),
    [
        (FusionConfig("scores", (0.8, 0.2), 20), 3),
        (FusionConfig("ranks", (1.0, 1.0), 20), 3),
        (FusionConfig("scores", (0.3, 0.7), 2), 9),
        (FusionConfig("ranks", (0.0, 1.0), 5), 5),
    ],
)
def test_hits_are_those_of_the_formula(
    config: RetrieverConfig, fusion: FusionConfig, k: int
) -> None:
    """Ids and scores equal a loop over the engines; a batch gives what its queries alone would."""
    config = replace(config, fusion=fusion)
    hybrid = build_retriever(config)
    batch = hybrid.search(QUERIES, k)
    for query, hits in zip(QUERIES, batch, strict=True):
        want = expected(config, query, k)
        assert [hit.document.id for hit in hits] == [id for id, _ in want]
        assert [hit.score for hit in hits] == pytest.approx([score for _, score in want])
        assert hybrid.search([query], k) == [hits]
    assert hybrid.search([], k) == []


def test_facts_tell_fusions_apart(config: RetrieverConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What affects the results is in `info`; weights are 1 each, of a static encoder a quarter."""
    fusions = [FusionConfig(), FusionConfig("ranks"), FusionConfig(fusion_weights=(0.8, 0.2))]
    facts = [build_retriever(replace(config, fusion=fusion)).info() for fusion in fusions]
    assert facts[0]["fusion"] == {"by": "scores", "weights": [1.0, 1.0], "depth": 20}
    assert len({str(each["fusion"]) for each in facts}) == 3
    assert [part["engine"] for part in facts[0]["parts"]] == ["bm25", "faiss"]
    monkeypatch.setattr(HashEncoder, "is_static", True, raising=False)
    assert build_retriever(config).info()["fusion"]["weights"] == [1.0, 0.25]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"fusion": FusionConfig(fusion_weights=(1.0,))}, "--fusion_weights"),
        ({"fusion": FusionConfig(fusion_weights=(0.0, 0.0))}, "--fusion_weights"),
        ({"retriever_name": "bm25+bm25"}, "--retriever_name"),
        ({"retriever_name": "bm25+"}, "--retriever_name"),
        ({"retriever_name": "bm25+random"}, "--retriever_name"),
    ],
)
def test_what_cannot_be_joined_is_refused(
    config: RetrieverConfig, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(SetupError, match=f"^{named}: got"):
        build_retriever(replace(config, **changes))


def test_a_collection_holds_no_hybrid() -> None:
    with pytest.raises(SetupError, match=r"^--to: got"):
        build_index(BuildConfig("bm25+bag", "x.jsonl", model_path="hash", to="milvus:a.db/b"))
