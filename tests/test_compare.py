"""The comparison of two runs."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.compare import Difference, differences, same_weights


def test_a_metric_that_differs_in_its_last_bit_is_found() -> None:
    """Floats are compared exactly, not as printed."""
    found = list(differences([{"step": 1, "em": 0.1}], [{"step": 1, "em": 0.1 + 2**-55}]))
    assert found == [Difference(1, "em", 0.1, 0.1 + 2**-55)]


def test_what_is_missing_is_a_difference() -> None:
    """Missing steps and missing metrics are differences."""
    expected = [{"step": 1, "em": 0.5}, {"step": 2, "em": 0.5}]
    found = {(d.step, d.name) for d in differences(expected, [{"step": 1, "f1": 0.5}])}
    assert found == {(2, "step"), (1, "em"), (1, "f1")}


def test_weights_are_compared_bit_for_bit(tmp_path: Path) -> None:
    """Folders with other file sizes may be equal; a difference of one bit is found."""
    a, b = torch.ones(2), torch.zeros(3)
    for name in ("one", "two", "other"):
        (tmp_path / name).mkdir()
    save_file({"a": a, "b": b}, tmp_path / "one" / "model.safetensors")
    save_file({"a": a}, tmp_path / "two" / "model-1.safetensors")
    save_file({"b": b}, tmp_path / "two" / "model-2.safetensors")
    save_file({"a": a, "b": b + 1e-30}, tmp_path / "other" / "model.safetensors")
    assert same_weights(tmp_path / "one", tmp_path / "two")
    assert not same_weights(tmp_path / "one", tmp_path / "other")
