"""Texts that are longer than a model reads are counted: by tokens, not by characters or guesses."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

from search_r1.retrieval.encoder import PairEncoder, open_encoder
from search_r1.retrieval.encoders.cross_encoder import CrossEncoder
from search_r1.retrieval.encoders.cuts import Cuts, count_longer
from search_r1.retrieval.index_builder import BuildConfig, build_index
from search_r1.retrieval.service.metrics import Metrics
from search_r1.retrieval.settings import EncoderConfig, RerankConfig
from tests.retrieval.conftest import write_corpus
from tests.retrieval.encoders.conftest import SIZES, save_tokenizer

LIMIT = 12
TEXTS = [" ".join(["river"] * count) for count in (1, 9, 10, 11, 30)]
"""Of one token a word, and two special ones: the first three fit into 12 tokens."""


@pytest.mark.parametrize("kind", ["plain", "modules"])
def test_an_encoder_counts_what_it_cuts(
    kind: str,
    make_model: Callable[..., str],
    declare: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Queries and passages apart, of models in every layout; only the first cut query is logged."""
    path = make_model("model")
    if kind == "modules":
        declare(path, {"pooling_mode_max_tokens": True}, "Pooling", "Normalize")
    pooling = "mean" if kind == "plain" else None
    encoder = open_encoder(
        EncoderConfig(path, pooling_method=pooling, query_max_length=LIMIT), max_length=LIMIT
    )
    assert encoder.pooling == (pooling or "modules")
    queries, passages = encoder.cuts
    encoder.encode_queries(TEXTS[:3])
    assert (queries.num_texts, queries.num_cut, caplog.text) == (3, 0, "")
    for _ in range(2):
        encoder.encode_queries(TEXTS)
    encoder.encode_queries([])
    assert (queries.num_cut, passages.num_cut) == (4, 0)
    assert len(caplog.records) == 1 and "--query_max_length" in caplog.text
    encoder.encode_passages(TEXTS)
    assert (queries.num_cut, passages.num_cut) == (4, 2)
    assert PairEncoder(encoder, encoder).cuts == (queries, passages)


def test_a_reranker_counts_pairs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A pair is cut if query, document and special tokens are too many together."""
    path = tmp_path / "cross"
    save_tokenizer(path)
    BertForSequenceClassification(BertConfig(**SIZES, num_labels=1)).save_pretrained(path)
    scorer = CrossEncoder.open(RerankConfig(str(path), reranker_max_length=LIMIT))
    scorer.scores([(TEXTS[0], text) for text in TEXTS])
    assert (scorer.cuts[0].num_texts, scorer.cuts[0].num_cut) == (5, 4)  # 1 + 9 + 3 tokens are 13
    assert "--reranker_max_length" in caplog.text


@pytest.mark.parametrize("limit", range(8, 16))
def test_counts_are_those_of_the_whole_texts(limit: int, tmp_path: Path) -> None:
    """Equal to tokenizing everything; short texts are not tokenized."""
    save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path))
    texts = [*TEXTS, "湖" * 14, "\ud800" * 20, ""]
    expected = sum(len(tokenizer(text)["input_ids"]) > limit for text in TEXTS)
    assert count_longer(tokenizer, [(text,) for text in TEXTS], limit) == expected
    pairs = [(a, b) for a in texts[:6] for b in texts[:6]]
    expected = sum(len(tokenizer(*pair)["input_ids"]) > limit for pair in pairs)
    assert count_longer(tokenizer, pairs, limit) == expected


@pytest.mark.parametrize("max_length", [LIMIT, 48])
def test_a_build_says_how_many_passages_it_cuts(
    max_length: int,
    make_model: Callable[..., str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Once, at its end, with their share; nothing if none is cut."""
    corpus = write_corpus(tmp_path / "corpus.jsonl", [("", text) for text in TEXTS])
    caplog.set_level(logging.WARNING)
    model = make_model("contriever")
    build_index(
        BuildConfig("e5", str(corpus), str(tmp_path), model_path=model, max_length=max_length)
    )
    lines = [record.getMessage() for record in caplog.records if "cut off" in record.getMessage()]
    assert len(lines) == (1 if max_length == LIMIT else 0)
    assert all(line.startswith("4 of 5 passages (80.0 %)") for line in lines)  # with quotes


def test_metrics_have_the_counts() -> None:
    """As counters by kind, read when the metrics are."""
    metrics, cuts = Metrics(), Cuts("queries", LIMIT, "--query_max_length")
    metrics.watch_cuts((cuts, Cuts("pairs")))
    cuts.add(5, 2)
    text = metrics.text().decode()
    assert 'retriever_encoded_texts_total{kind="queries"} 5.0' in text
    assert 'retriever_cut_texts_total{kind="queries"} 2.0' in text
    assert 'retriever_cut_texts_total{kind="pairs"} 0.0' in text
