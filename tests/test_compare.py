"""The comparison of two runs."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.compare import Difference, differences, read_rows, same_weights


def test_a_metric_that_differs_in_its_last_bit_is_found() -> None:
    """Floats are compared exactly, not as printed."""
    found = list(differences([{"step": 1, "em": 0.1}], [{"step": 1, "em": 0.1 + 2**-55}]))
    assert found == [Difference(1, "em", 0.1, 0.1 + 2**-55)]


def test_timings_may_differ() -> None:
    """Timings and throughput do not depend on the seed; the number of tokens does."""
    expected = [{"step": 1, "timing_s/gen": 1.0, "perf/total_num_tokens": 5.0}]
    got = [{"step": 1, "timing_s/gen": 9.0, "perf/total_num_tokens": 6.0}]
    assert [d.name for d in differences(expected, got)] == ["perf/total_num_tokens"]


def test_a_repeated_step_is_compared_each_time() -> None:
    """The steps that a restarted run repeats must be equal each time."""
    expected = [{"step": 1, "em": 0.5}]
    got = [{"step": 1, "em": 0.5}, {"step": 1, "em": 0.25}]
    assert [d.got for d in differences(expected, got)] == [0.25]


def test_what_is_missing_is_a_difference() -> None:
    """Missing steps and missing metrics are differences."""
    expected = [{"step": 1, "em": 0.5}, {"step": 2, "em": 0.5}]
    found = {(d.step, d.name) for d in differences(expected, [{"step": 1, "f1": 0.5}])}
    assert found == {(2, "step"), (1, "em"), (1, "f1")}


def test_the_tolerance_is_respected() -> None:
    """With a tolerance of 0.015, 0.01 is allowed and 0.02 is not."""
    expected = [{"step": 1, "a": 0.0, "b": 0.0}]
    got = [{"step": 1, "a": 0.01, "b": 0.02}]
    assert [d.name for d in differences(expected, got, tolerance=0.015)] == ["b"]


def test_an_incomplete_line_is_left_out(tmp_path: Path) -> None:
    """A kill during a write loses that line, and the comparison continues."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "em": 0.5}\n{"step": 2, "e')
    assert read_rows(path) == [{"step": 1, "em": 0.5}]


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
