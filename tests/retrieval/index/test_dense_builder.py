"""Dense indexes: manifest, saved embeddings, several processes, and early errors."""

import json
from pathlib import Path

import numpy as np
import pytest

from search_r1.retrieval.corpus import Corpus
from search_r1.retrieval.encoder import HashEncoder
from search_r1.retrieval.errors import CorpusError, IndexMismatch, SetupError
from search_r1.retrieval.index import dense_builder
from search_r1.retrieval.index.embeddings import EmbeddingFile, encode
from search_r1.retrieval.index_builder import BuildConfig, build_index
from search_r1.retrieval.manifest import Manifest
from search_r1.retrieval.settings import EncoderConfig


def write_rows(path: Path, count: int) -> Path:
    rows = [{"id": str(i), "contents": f'"T{i}"\nword{i % 7} other{i}'} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def expected_embeddings(path: Path, dim: int = 64) -> np.ndarray:
    return HashEncoder(dim).encode_passages([d.contents for d in Corpus.open(path)])


def test_several_processes_equal_one(tmp_path: Path) -> None:
    """Two processes write the same embeddings as one loop over the corpus."""
    path = write_rows(tmp_path / "c.jsonl", 50)
    config = BuildConfig("e5", str(path), str(tmp_path), "hash", shard_rows=4)
    config = BuildConfig(**vars(config) | {"devices": ("cpu", "cpu"), "save_embedding": True})
    build_index(config)
    embeddings = np.load(tmp_path / "e5_embeddings.npy")
    np.testing.assert_allclose(embeddings, expected_embeddings(path), atol=1e-6)


def test_an_error_of_a_process_is_raised(tmp_path: Path) -> None:
    """A malformed row that only a worker reads ends the build with an error that names the row."""
    path = write_rows(tmp_path / "c.jsonl", 30)
    path.write_text(path.read_text() + '{"id": "30"}\n')
    file = EmbeddingFile.create(tmp_path, 31, 64, "float32", 4)
    with pytest.raises(CorpusError, match="row 31"):
        encode(file, Corpus.open(path), HashEncoder(), [EncoderConfig("hash")] * 2, None)


def test_done_shards_are_not_encoded_again(tmp_path: Path) -> None:
    """Only documents of missing shards are encoded."""

    class Counting(HashEncoder):
        passages = 0

        def encode_passages(self, passages: list[str]) -> np.ndarray:  # type: ignore[override]
            self.passages += len(passages)
            return super().encode_passages(passages)

    path = write_rows(tmp_path / "c.jsonl", 10)
    file = EmbeddingFile.create(tmp_path, 10, 64, "float32", 4)
    expected = expected_embeddings(path)
    file.write(1, expected[4:8])
    encoder = Counting()
    encode(file, Corpus.open(path), encoder, [EncoderConfig("hash")], None)
    assert encoder.passages == 6
    np.testing.assert_array_equal(file.matrix, expected)


def test_the_manifest_has_encoder_and_options(tmp_path: Path) -> None:
    """Encoder, options and factory are in the manifest."""
    path = write_rows(tmp_path / "c.jsonl", 20)
    folder = build_index(
        BuildConfig(
            "e5",
            str(path),
            str(tmp_path),
            "hash:32",
            faiss_type="HNSW16,Flat",
            embedding_dtype="float16",
            max_length=99,
        )
    )
    assert folder == tmp_path / "e5_HNSW16_Flat.index"
    manifest = Manifest.load(folder)
    assert (manifest.encoder, manifest.dim, manifest.dtype) == ("hash", 32, "float16")
    assert (manifest.factory, manifest.max_length) == ("HNSW16,Flat", 99)
    assert manifest.normalizes and manifest.created and manifest.made_with.startswith("faiss")


def test_saved_embeddings_build_another_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved embeddings give the same index without encoding the corpus again.

    Its manifest has their dtype, whatever the option for new embeddings says.
    """
    path = write_rows(tmp_path / "c.jsonl", 20)
    options = {"save_embedding": True, "embedding_dtype": "float16"}
    first = build_index(BuildConfig("e5", str(path), str(tmp_path), "hash", **options))
    saved = tmp_path / "e5_embeddings.npy"
    monkeypatch.setattr(dense_builder, "encode", None)
    config = BuildConfig("e5", str(path), str(tmp_path / "b"), "hash", embedding_path=str(saved))
    second = build_index(config)
    assert (first / "vectors.faiss").read_bytes() == (second / "vectors.faiss").read_bytes()
    assert Manifest.load(second).dtype == "float16"


def test_embeddings_of_another_corpus_are_refused(tmp_path: Path) -> None:
    """Embeddings of the right shape, but of other documents, are detected."""
    path = write_rows(tmp_path / "c.jsonl", 20)
    np.save(tmp_path / "e.npy", expected_embeddings(path)[::-1])
    config = BuildConfig(
        "e5", str(path), str(tmp_path), "hash", embedding_path=str(tmp_path / "e.npy")
    )
    with pytest.raises(IndexMismatch, match="cosine"):
        build_index(config)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"faiss_type": "Nonsense"}, "cannot be made"),
        ({"faiss_type": "IVF64,Flat"}, "for a smaller corpus: Flat, SQ8"),
        ({"embedding_dtype": "int8"}, "float32 or float16"),
    ],
)
def test_mistakes_are_named_before_the_encoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, str], problem: str
) -> None:
    """An invalid factory or dtype is refused before anything is written."""
    monkeypatch.setattr(dense_builder, "encode", None)
    path = write_rows(tmp_path / "c.jsonl", 20)
    with pytest.raises(SetupError, match=problem):
        build_index(BuildConfig("e5", str(path), str(tmp_path / "out"), "hash", **options))
    assert not (tmp_path / "out").exists()


def test_a_malformed_row_is_named_before_the_encoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows are checked before the first one is encoded."""
    monkeypatch.setattr(dense_builder, "encode", None)
    path = write_rows(tmp_path / "c.jsonl", 20)
    path.write_text(path.read_text() + "oops\n")
    with pytest.raises(CorpusError, match="row 21"):
        build_index(BuildConfig("e5", str(path), str(tmp_path / "out"), "hash"))
    assert list((tmp_path / "out").iterdir()) == []
