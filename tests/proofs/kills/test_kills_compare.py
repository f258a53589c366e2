"""Two runs held against each other."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.proofs.kills.compare import Difference, differences, read_rows, same_weights


def test_a_metric_that_moved_in_its_last_bit_is_found() -> None:
    """Equality is that of floats, not of what is printed of them."""
    found = list(differences([{"step": 1, "em": 0.1}], [{"step": 1, "em": 0.1 + 2**-55}]))
    assert found == [Difference(1, "em", 0.1, 0.1 + 2**-55)]


def test_clocks_may_differ() -> None:
    """Timings and throughput say nothing of the seed; the number of tokens does."""
    expected = [{"step": 1, "timing_s/gen": 1.0, "perf/total_num_tokens": 5.0}]
    got = [{"step": 1, "timing_s/gen": 9.0, "perf/total_num_tokens": 6.0}]
    assert [d.name for d in differences(expected, got)] == ["perf/total_num_tokens"]


def test_a_step_done_twice_counts_twice() -> None:
    """What a restarted run does again must be right each time."""
    expected = [{"step": 1, "em": 0.5}]
    got = [{"step": 1, "em": 0.5}, {"step": 1, "em": 0.25}]
    assert [d.got for d in differences(expected, got)] == [0.25]


def test_what_is_missing_is_a_difference() -> None:
    """A step without a row, and a metric without a value, are never passed over."""
    expected = [{"step": 1, "em": 0.5}, {"step": 2, "em": 0.5}]
    found = {(d.step, d.name) for d in differences(expected, [{"step": 1, "f1": 0.5}])}
    assert found == {(2, "step"), (1, "em"), (1, "f1")}


def test_a_tolerance_is_kept_and_no_more() -> None:
    """0.01 is let through at a tolerance of 0.015, 0.02 is not."""
    expected = [{"step": 1, "a": 0.0, "b": 0.0}]
    got = [{"step": 1, "a": 0.01, "b": 0.02}]
    assert [d.name for d in differences(expected, got, tolerance=0.015)] == ["b"]


def test_a_torn_line_is_left_out(tmp_path: Path) -> None:
    """A kill in the middle of a write costs that line, not the comparison."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "em": 0.5}\n{"step": 2, "e')
    assert read_rows(path) == [{"step": 1, "em": 0.5}]


def test_weights_are_compared_bit_for_bit(tmp_path: Path) -> None:
    """Folders that are cut differently hold the same; one other bit is seen."""
    a, b = torch.ones(2), torch.zeros(3)
    for name in ("one", "two", "other"):
        (tmp_path / name).mkdir()
    save_file({"a": a, "b": b}, tmp_path / "one" / "model.safetensors")
    save_file({"a": a}, tmp_path / "two" / "model-1.safetensors")
    save_file({"b": b}, tmp_path / "two" / "model-2.safetensors")
    save_file({"a": a, "b": b + 1e-30}, tmp_path / "other" / "model.safetensors")
    assert same_weights(tmp_path / "one", tmp_path / "two")
    assert not same_weights(tmp_path / "one", tmp_path / "other")
