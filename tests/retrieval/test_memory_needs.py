"""The memory check accepts sufficient machines and refuses small ones."""

import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from search_r1.retrieval.engines.flat_file import HEADER
from search_r1.retrieval.errors import SetupError
from search_r1.retrieval.memory import Host, check_memory, estimate, table
from search_r1.retrieval.settings import (
    EncoderConfig,
    FaissConfig,
    RerankConfig,
    RetrieverConfig,
    TorchConfig,
)

ROWS, DIM = 21_015_324, 768
GB = 10**9


@pytest.fixture(scope="module")
def wiki(tmp_path_factory: pytest.TempPathFactory) -> RetrieverConfig:
    """Settings for an index as large as wiki-18's, stored as a header and a sparse file."""
    folder = tmp_path_factory.mktemp("wiki")
    header = HEADER.pack(b"IxFI", DIM, ROWS, 1 << 20, 1 << 20, True, 0, ROWS * DIM)
    with (folder / "e5_Flat.index").open("wb") as file:
        file.write(header)
        file.truncate(HEADER.size + 4 * ROWS * DIM)
    (folder / "wiki.jsonl").write_text("{}\n")
    return RetrieverConfig(
        "e5", str(folder / "wiki.jsonl"), str(folder), encoder=EncoderConfig("hash")
    )


def with_torch(config: RetrieverConfig, dtype: str, *devices: str) -> RetrieverConfig:
    """Return the settings with the torch backend on `devices`."""
    torch = TorchConfig(dense_engine="torch", matrix_dtype=dtype, matrix_devices=devices)
    return replace(config, torch=torch)


@pytest.mark.parametrize(
    ("dtype", "per_row"), [("float32", 4 * DIM), ("bfloat16", 2 * DIM), ("int8", DIM + 4)]
)
def test_matrix_is_shared_by_the_devices(wiki: RetrieverConfig, dtype: str, per_row: int) -> None:
    """Shards are equal; a device that is named twice gets two."""
    config = with_torch(wiki, dtype, "cuda:0", "cuda:1", "cuda", "cpu")
    sizes = {n.device: n.bytes for n in estimate(config, 2) if n.what.startswith("matrix")}
    total = ROWS * per_row
    assert sizes == {
        "cuda:0": pytest.approx(total / 2, abs=1),
        "cuda:1": pytest.approx(total / 4, abs=1),
        "cpu": pytest.approx(total / 4, abs=1),
    }


def test_matrix_is_on_all_gpus_by_default(wiki: RetrieverConfig) -> None:
    """Without --matrix_devices every GPU gets a shard, and the host one tile."""
    needs = estimate(with_torch(wiki, "float16"), 4)
    matrix = [n for n in needs if n.what.startswith("matrix")]
    assert [n.device for n in matrix] == [f"cuda:{i}" for i in range(4)]
    on_host = [n.bytes for n in needs if n.device == "cpu" and not n.optional]
    assert on_host == [65536 * DIM * 4, ROWS * 8]


def test_large_machine_passes_with_a_table(
    wiki: RetrieverConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """Needed and free memory are logged before anything is loaded."""
    caplog.set_level(logging.INFO)
    check_memory(wiki, Host(128 * GB))
    assert "64.6 GB  index (FAISS)" in caplog.text
    assert "64.7 GB  needed of 128.0 GB free" in caplog.text


def test_small_machine_is_refused_with_hints(wiki: RetrieverConfig) -> None:
    """The error has the needed and free memory, and settings that need less."""
    with pytest.raises(SetupError) as caught:
        check_memory(with_torch(wiki, "float32"), Host(24 * GB))
    text = str(caught.value)
    assert "cpu needs 65.1 GB (matrix (float32) 64.6 GB" in text and "but 24.0 GB is free" in text
    assert "--matrix_dtype bfloat16 (32.3 GB) or int8 (16.2 GB)" in text
    assert "--faiss_type IVF4096,SQ8" in text
    check_memory(with_torch(wiki, "int8"), Host(24 * GB))


def test_small_gpus_are_refused(wiki: RetrieverConfig) -> None:
    """FAISS shards a Flat index over GPUs in float16, 32.3 GB in total."""
    gpu = replace(wiki, faiss=FaissConfig(faiss_gpu=True))
    with pytest.raises(SetupError) as caught:
        check_memory(gpu, Host(16 * GB, (24 * GB,)))
    text = str(caught.value)
    assert "cuda:0 needs 32.3 GB (index shard (float16) 32.3 GB), but 24.0 GB is free" in text
    check_memory(gpu, Host(16 * GB, (24 * GB, 24 * GB)))


def test_missing_gpu_is_named(wiki: RetrieverConfig) -> None:
    """The error for a missing --matrix_devices cuda:1 lists the available devices."""
    with pytest.raises(
        SetupError, match=r"does not exist here \(there are cpu, cuda:0\)"
    ) as caught:
        check_memory(with_torch(wiki, "int8", "cuda:1"), Host(200 * GB, (80 * GB,)))
    assert str(caught.value).startswith("cuda:1, for matrix (int8)")
    assert "free memory" not in str(caught.value), "more memory would not help"


def test_unknown_model_size_is_reported(wiki: RetrieverConfig) -> None:
    """A model that is not downloaded has unknown size in the table and causes no refusal."""
    config = replace(wiki, encoder=EncoderConfig("intfloat/e5-base-v2"))
    rerank = RerankConfig("BAAI/bge-reranker-base", reranker_device="cpu")
    config = replace(config, rerank=rerank)
    on_gpu = {n.what: n.device for n in estimate(config, 1) if "e5" in n.what or "bge" in n.what}
    assert list(on_gpu.values()) == ["cuda:0", "cpu"]
    lines = table(estimate(config), Host(128 * GB)).splitlines()
    assert sum("unknown  encoder e5-base-v2" in line for line in lines) == 1
    assert sum("unknown  reranker bge-reranker-base" in line for line in lines) == 1
    check_memory(config, Host(128 * GB))


def test_mapped_files_are_optional(tmp_path: Path) -> None:
    """BM25 can serve from disk, so a machine with too little memory for its files passes."""
    corpus, folder = tmp_path / "corpus.jsonl", tmp_path / "bm25"
    corpus.write_bytes(bytes(3000))
    folder.mkdir()
    (folder / "data.npy").write_bytes(bytes(5000))
    config = RetrieverConfig("bm25", str(corpus), str(folder))
    optional = {n.what: n.bytes for n in estimate(config) if n.optional}
    assert optional == {"index (mapped files)": 5000, "documents (mapped file)": 3000}
    check_memory(config, Host(100))


def test_missing_files_are_ignored() -> None:
    """Missing files are ignored: opening them raises a better error."""
    check_memory(
        RetrieverConfig("e5", "/no/corpus", "/no/index", encoder=EncoderConfig("hash")), Host(1)
    )
    check_memory(RetrieverConfig("e5", encoder=EncoderConfig("hash")), Host(1))


def test_bm25_is_checked_without_torch(tmp_path: Path) -> None:
    """The memory check loads neither torch nor FAISS unless a backend needs them."""
    code = (
        "import sys; from search_r1.retrieval.memory import check_memory;"
        "from search_r1.retrieval.settings import RetrieverConfig;"
        "check_memory(RetrieverConfig('bm25'));"
        "sys.exit(bool({'torch', 'faiss'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
