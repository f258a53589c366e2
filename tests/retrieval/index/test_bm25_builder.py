"""BM25 indexes from shards, compared with those from all documents at once."""

from pathlib import Path

import bm25s
import numpy as np
import pytest

from search_r1.retrieval.corpus import Corpus
from search_r1.retrieval.index.bm25_builder import make_shard, merge_shards
from search_r1.retrieval.index_builder import BuildConfig, build_index
from search_r1.retrieval.manifest import Manifest
from search_r1.retrieval.tokenization import FOLDED, fold, tokenize

TEXTS = ["Danube river", "the of", "", "river Danube DANUBE café", "Seine river and a Zürich"]


def test_words_are_numbered_as_in_one_piece() -> None:
    """Ids and vocabulary equal those of bm25s, for any division into shards."""
    whole = bm25s.tokenize([fold(text) for text in TEXTS], stopwords="en", show_progress=False)
    for rows in (1, 2, 5):
        shards = [make_shard(tokenize(TEXTS[i : i + rows])) for i in range(0, len(TEXTS), rows)]
        documents, vocab = merge_shards(iter(shards))
        assert list(documents) == whole.ids and len(documents) == len(TEXTS)
        assert list(vocab.items()) == list(whole.vocab.items())


@pytest.mark.parametrize("shard_rows", [1, 3, 100])
def test_shards_leave_no_trace_in_the_index(
    tmp_path: Path, corpus_path: Path, shard_rows: int
) -> None:
    """The index equals, file by file, an index that bm25s makes of all documents at once."""
    config = BuildConfig("bm25", str(corpus_path), str(tmp_path), shard_rows=shard_rows)
    folder = build_index(config)
    texts = [fold(document.contents) for document in Corpus.open(corpus_path)]
    oracle = bm25s.BM25()
    oracle.index(bm25s.tokenize(texts, stopwords="en", show_progress=False), show_progress=False)
    oracle.save(tmp_path / "oracle")
    for path in (tmp_path / "oracle").iterdir():
        assert (folder / path.name).read_bytes() == path.read_bytes(), path.name
    manifest = Manifest.load(folder)
    assert manifest.made_with.startswith("bm25s") and manifest.count == len(texts)
    assert manifest.analyzer == FOLDED


def test_a_corpus_without_words_is_indexed(tmp_path: Path) -> None:
    """A corpus of stop words only can be indexed."""
    path = tmp_path / "c.jsonl"
    path.write_text('{"id": "1", "contents": "the of"}\n')
    folder = build_index(BuildConfig("bm25", str(path), str(tmp_path)))
    assert np.load(folder / "indptr.csc.index.npy").size >= 1
