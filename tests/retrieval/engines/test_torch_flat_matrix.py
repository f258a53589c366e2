"""The sharded torch index, compared with FAISS, with numpy and with bounds of rounding errors."""

from itertools import pairwise
from pathlib import Path

import faiss
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from search_r1.retrieval.engines.shard import DTYPES, quantize
from search_r1.retrieval.engines.torch_flat import TorchFlatIndex, choose_devices, recall
from search_r1.retrieval.errors import IndexMismatch, SetupError
from tests.retrieval.engines.flat_indexes import brute_force, layout, load, random_rows, unit, write
from verl.machine import HostMemory


@pytest.mark.parametrize(
    "kind", [faiss.IndexFlatIP, faiss.IndexFlatL2], ids=["inner_product", "l2"]
)
@pytest.mark.parametrize("dim", [64, 384])
def test_ids_are_those_of_faiss_flat(tmp_path: Path, kind: type[faiss.Index], dim: int) -> None:
    """1,000 queries find the same rows as FAISS Flat, except for the order of equal scores."""
    vectors = random_rows(1, 6000, dim, copies=600)
    flat = write(tmp_path / "flat", vectors, kind)
    reference = faiss.read_index(str(tmp_path / "flat"))
    queries = unit(vectors[:1000] + 0.1 * random_rows(2, 1000, dim))
    expected_scores, expected = reference.search(queries, 5)
    scores, rows = load(flat, layout(tile_rows=1111)).search(queries, 5)
    sign = 1 if kind is faiss.IndexFlatIP else -1
    np.testing.assert_allclose(np.array(scores), sign * expected_scores, atol=2e-6)
    for query, ours, theirs in zip(queries, rows, expected.tolist(), strict=True):
        gap = (vectors[ours].astype(np.float64) - vectors[theirs]) @ query.astype(np.float64)
        for rank in range(5):
            assert ours[rank] == theirs[rank] or abs(gap[rank]) < 2e-7
        assert all(a < b for a, b in pairwise(ours) if np.array_equal(vectors[a], vectors[b])), (
            "copies rank by row"
        )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(0, 10**6), st.integers(1, 70), st.integers(1, 9), st.integers(1, 80),
    st.integers(1, 30), st.integers(1, 5), st.booleans(),
)  # fmt: skip
def test_any_size_is_brute_force(
    tmp_path: Path, seed: int, rows: int, dim: int, k: int, tile: int, shards: int, is_l2: bool
) -> None:
    """Results equal numpy's for any number of rows, neighbours, shards and tile rows; ties by row.

    The vectors are small integers, so that scores are exact and many are equal.
    """
    rng = np.random.default_rng(seed)
    vectors = rng.integers(-2, 3, (rows, dim)).astype(np.float32)
    queries = rng.integers(-2, 3, (4, dim)).astype(np.float32)
    kind = faiss.IndexFlatL2 if is_l2 else faiss.IndexFlatIP
    index = load(
        write(tmp_path / "flat", vectors, kind), layout("float32", ("cpu",) * shards, tile)
    )
    scores, found = index.search(queries, k)
    expected = brute_force(queries, vectors, k, is_l2)
    assert found == expected[1].tolist()
    assert scores == expected[0].tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rescore", [0, 20])
def test_layout_and_batch_change_nothing(tmp_path: Path, dtype: str, rescore: int) -> None:
    """A result is the same bit for bit for any tiles, shards and other queries in the batch."""
    flat = write(tmp_path / "flat", random_rows(5, 700, 48, copies=100))
    queries = random_rows(6, 300, 48)
    expected = load(flat, layout(dtype, rescore=rescore)).search(queries, 4)
    for devices, tile in ((("cpu",) * 3, 50), (("cpu",) * 2, 7 * 41), (("cpu",), 1)):
        index = load(flat, layout(dtype, devices, tile, rescore))
        assert index.search(queries, 4) == expected
    index = load(flat, layout(dtype, rescore=rescore))
    alone = [index.search(queries[i : i + 1], 4) for i in range(20)]
    assert [(s[0], r[0]) for s, r in alone] == list(
        zip(expected[0][:20], expected[1][:20], strict=True)
    )


@pytest.mark.parametrize(
    ("dtype", "step"), [("float16", 2.0**-11), ("bfloat16", 2.0**-8), ("int8", 1 / 254)]
)
def test_scores_stay_within_the_rounding_of_the_dtype(
    tmp_path: Path, dtype: str, step: float
) -> None:
    """|q·v - score| <= sum over i of |q_i| times the largest rounding error of v_i.

    That error is half of the last bit of each value for floats, half of the row's scale for int8.
    """
    vectors, queries = random_rows(7, 400, 32), random_rows(8, 50, 32)
    scores, rows = load(write(tmp_path / "flat", vectors), layout(dtype)).search(queries, 10)
    assert scores != brute_force(queries, vectors, 10)[0].tolist()
    for query, values, found in zip(queries, scores, rows, strict=True):
        for score, row in zip(values, found, strict=True):
            largest = np.abs(vectors[row]).max() if dtype == "int8" else np.abs(vectors[row])
            bound = float((np.abs(query) * largest * step).sum()) + 2e-6
            assert abs(score - float(query @ vectors[row])) <= bound


def test_int8_codes_are_within_half_a_scale() -> None:
    """Rows of zeros, of tiny values and of large values are quantised symmetrically."""
    vectors = torch.tensor([[0.0, 0.0], [1e-30, -1e-30], [3e4, 1.0], [0.5, -0.25]])
    codes, scales = quantize(vectors)
    assert codes.abs().max() == 127 and codes.dtype == torch.int8
    assert torch.equal(codes[0], torch.zeros(2, dtype=torch.int8))
    error = (codes.float() * scales[:, None] - vectors).abs()
    assert (error <= scales[:, None] * 0.5001).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_rescored_candidates_have_exact_scores(tmp_path: Path, dtype: str) -> None:
    """With enough candidates, rows and scores equal those of float32."""
    vectors, queries = random_rows(9, 500, 24, copies=50), random_rows(10, 64, 24)
    flat = write(tmp_path / "flat", vectors)
    exact = load(flat, layout()).search(queries, 3)
    assert load(flat, layout(dtype, rescore=100)).search(queries, 3) == exact


def test_rescoring_fewer_than_k_still_gives_k(tmp_path: Path) -> None:
    """--rescore 2 with topk 5 still returns five hits."""
    vectors = random_rows(11, 40, 8)
    index = load(write(tmp_path / "flat", vectors), layout("bfloat16", rescore=2))
    assert [len(rows) for rows in index.search(vectors[:3], 5)[1]] == [5, 5, 5]


def test_float16_overflow_is_refused(tmp_path: Path) -> None:
    """Rows that overflow to infinity would win every search, so loading fails."""
    flat = write(tmp_path / "flat", np.full((3, 4), 1e5, dtype=np.float32))
    with pytest.raises(SetupError, match="bfloat16"):
        load(flat, layout("float16"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_vectors_that_are_not_finite_are_refused(tmp_path: Path, dtype: str, value: float) -> None:
    """Loading fails for every dtype; as int8 codes such vectors would look like numbers."""
    vectors = random_rows(12, 5, 4)
    vectors[3, 1] = value
    with pytest.raises(IndexMismatch, match=r"row 3 .*not finite"):
        load(write(tmp_path / "flat", vectors), layout(dtype))


def test_unknown_device_and_dtype_are_refused(tmp_path: Path) -> None:
    """The error names the flag and what is expected."""
    flat = write(tmp_path / "flat", random_rows(12, 3, 4))
    with pytest.raises(SetupError, match="--matrix_devices"):
        load(flat, layout(devices=("gpu7",)))
    with pytest.raises(SetupError, match="--matrix_dtype"):
        TorchFlatIndex(flat, layout("fp16"))


def test_a_matrix_beyond_the_free_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system would allocate it, and kill the server when the rows are read."""
    monkeypatch.setattr(HostMemory, "now", lambda: HostMemory(10**9, 190))
    flat = write(tmp_path / "flat", random_rows(12, 12, 4))
    with pytest.raises(SetupError, match="matrix_devices"):
        load(flat, layout(devices=("cpu",)))
    load(flat, layout("bfloat16", devices=("cpu",)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_agrees_with_cpu(tmp_path: Path, dtype: str) -> None:
    """A GPU, and shards on GPU and CPU together, find the same rows as a CPU."""
    vectors, queries = random_rows(13, 5000, 96), random_rows(14, 300, 96)
    flat = write(tmp_path / "flat", vectors)
    exact = load(flat, layout(dtype)).search(queries, 3)[1]
    for devices in (("cuda:0",), ("cuda:0", "cpu", "cuda:0")):
        found = load(flat, layout(dtype, devices, 999)).search(queries, 3)[1]
        assert recall(found, exact) > 0.999


def test_named_devices_win() -> None:
    """Named devices are used; without names all GPUs, or the CPU if there is none."""
    gpus = tuple(f"cuda:{i}" for i in range(torch.cuda.device_count()))
    assert choose_devices(("cpu", "cpu")) == ("cpu", "cpu")
    assert choose_devices(()) == (gpus or ("cpu",))
