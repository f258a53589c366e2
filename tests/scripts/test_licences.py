"""The licences of installed packages and of data in the repository."""

from scripts.licences import ATTRIBUTIONS


def test_shipped_data_of_others_is_attributed() -> None:
    """Every folder of data or weights in the repository has a row; GeoNames is named."""
    text = ATTRIBUTIONS.read_text(encoding="utf-8")
    for where in ("example/corpus.jsonl", "example/data/", "example/smollm2/adapter/",
                  "tests/oracles/", "tests/verl/ext/memory/models.json"):  # fmt: skip
        assert f"`{where}`" in text
        assert (ATTRIBUTIONS.parent / where).exists()
    assert "GeoNames" in text and "CC BY 4.0" in text
