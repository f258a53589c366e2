"""Sizes of matrices and models, free memory, and the memory of a process."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from search_r1.retrieval.errors import SetupError
from search_r1.retrieval.memory import Host, bytes_of_matrix, bytes_of_model, resident


@pytest.mark.parametrize(
    ("dtype", "per_row"),
    [("float32", 3072), ("float16", 1536), ("bfloat16", 1536), ("int8", 768 + 4)],
)
def test_matrix_of_wiki_18(dtype: str, per_row: int) -> None:
    """A 21,015,324 × 768 matrix needs its values, and with int8 one scale per row."""
    assert bytes_of_matrix(dtype, 21_015_324, 768) == 21_015_324 * per_row


def test_unknown_dtypes_are_refused() -> None:
    """A dtype of unknown size is an error."""
    with pytest.raises(SetupError, match="dtype 'fp16'; expected float32, float16"):
        bytes_of_matrix("fp16", 10, 8)


def write_safetensors(path: Path, shapes: list[list[int]]) -> None:
    """Write a safetensors file: header length, JSON header, float32 zeros."""
    header, end = {}, 0
    for i, shape in enumerate(shapes):
        size = 4 * int(np.prod(shape))
        header[f"w{i}"] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))


def test_model_bytes_are_its_parameters_in_the_dtype(tmp_path: Path) -> None:
    """The stored dtype does not matter; .bin files count only without safetensors files."""
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(400))
    assert bytes_of_model(str(tmp_path), "float16") == 200
    (tmp_path / "2_Dense").mkdir()
    write_safetensors(tmp_path / "model.safetensors", [[3, 5], [7]])
    write_safetensors(tmp_path / "2_Dense" / "model.safetensors", [[2]])
    assert bytes_of_model(str(tmp_path), "float32") == 4 * 24
    assert bytes_of_model(str(tmp_path), "bfloat16") == 2 * 24
    assert bytes_of_model("intfloat/e5-base-v2", "float32") is None


def test_damaged_model_is_refused(tmp_path: Path) -> None:
    """An incomplete download is an error before anything is loaded."""
    (tmp_path / "model.safetensors").write_bytes(b"\0\0")
    with pytest.raises(SetupError, match=r"model\.safetensors is not a safetensors file"):
        bytes_of_model(str(tmp_path), "float32")


def test_this_machine_has_free_memory() -> None:
    """Without GPUs, the host's free memory is measured without torch."""
    host = Host.measure(with_gpus=False)
    assert 1 << 20 < host.free < 1 << 50 and host.gpus == ()


def test_own_memory_and_mapped_files_of_a_process(tmp_path: Path) -> None:
    """Resident pages of a mapped file are counted separately from the process's own memory."""
    path, size = tmp_path / "index", 40 << 20
    path.write_bytes(bytes(size))
    before = resident()
    mapped = np.memmap(path, np.uint8, "r")
    assert int(mapped[::4096].sum()) == 0
    after = resident()
    assert after["mapped"] - before["mapped"] > 0.9 * size
    assert after["own"] - before["own"] < 0.5 * size
