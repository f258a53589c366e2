"""Results on disk, tables, and the results in the documentation."""

from pathlib import Path

import pytest

from benchmarks.retrieval.figures import Figure
from benchmarks.retrieval.report import (
    BEGIN,
    END,
    PartResult,
    append,
    load,
    table,
    verdicts,
    write_docs,
)

FIGURES = [
    Figure("rate", 9.5, "x", at_least=8),
    Figure("p99", 0.5, "x", at_most=0.25),
    Figure("faiss: stage encode", 3.0, "ms/query"),
]


def result(part: str = "clients-44k", *, is_trial: bool = False) -> PartResult:
    return PartResult(part, "64 clients.", FIGURES, {"rounds": 2}, "2 cores", is_trial)


def test_the_last_result_of_a_part_counts(tmp_path: Path) -> None:
    """A repeated part replaces its older result; the others stay."""
    path = tmp_path / "new" / "results.jsonl"
    newer = PartResult("a", "again", [], {}, "2 cores")
    for part_result in (result("a"), result("b"), newer):
        append(path, part_result)
    assert load(path) == {"a": newer, "b": result("b")}


def test_a_target_is_printed_next_to_its_figure() -> None:
    """The table shows whether targets are met; the summary counts them."""
    text = table(result())
    assert "| rate | 9.5 x | ≥ 8: met |" in text
    assert "| p99 | 0.5 x | ≤ 0.25: **not met** |" in text
    assert verdicts([result()]).startswith("1 of 2 targets met.")


def test_docs_get_the_results_between_the_markers(tmp_path: Path) -> None:
    """Writing twice leaves one table, and does not change the text around it."""
    path = tmp_path / "benchmarks.md"
    path.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for _ in range(2):
        write_docs({"clients-44k": result()}, path)
    text = path.read_text()
    assert text.startswith("before\n")
    assert text.endswith(f"{END}\nafter\n")
    assert text.count("### clients-44k") == 1
    assert "| rate |" in text and "stage encode" not in text
    assert "old" not in text


@pytest.mark.parametrize("results", [{}, {"a": result("a", is_trial=True)}])
def test_trials_never_reach_the_docs(tmp_path: Path, results: dict[str, PartResult]) -> None:
    """Results of --trial and missing results are refused."""
    with pytest.raises(ValueError, match="expected full measurements"):
        write_docs(results, tmp_path / "benchmarks.md")
