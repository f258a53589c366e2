"""The batches with which the benchmark of weight changes trains."""

from pathlib import Path

import pytest

from benchmarks import weight_delta
from example.model import load_tokenizer


def test_every_batch_has_the_requested_trajectories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text that is left over at the end does not become a batch shorter than its masks."""
    load_tokenizer().save_pretrained(str(tmp_path))
    (tmp_path / "page.md").write_text("one two three four five six seven eight nine ten\n" * 100)
    monkeypatch.setattr(weight_delta, "TEXTS", tmp_path)
    batches = list(weight_delta.batches(str(tmp_path), 2))
    assert batches
    for batch in batches:
        assert batch.num_tokens == 2 * weight_delta.LENGTH
        assert {len(column) for column in batch.tokens.values()} == {batch.num_tokens}
