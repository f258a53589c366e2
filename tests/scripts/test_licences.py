"""The licences of installed packages and of data in the repository."""

from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

from scripts.licences import ATTRIBUTIONS, UNKNOWN, licence_of, table


def package(folder: Path, *lines: str) -> PathDistribution:
    info = folder / "abc-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("\n".join(["Name: Abc", "Version: 1.0", *lines]) + "\n")
    return PathDistribution(info)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["License-Expression: MIT", "License: free text"], "MIT"),
        (["Classifier: License :: OSI Approved :: BSD License", "License: x"], "BSD License"),
        (["License: Apache 2.0\n        and its whole text"], "Apache 2.0"),
        (["License: " + "x" * 1000], "x" * 60),
        ([], UNKNOWN),
    ],
)
def test_a_licence_is_read_where_packages_write_it(
    tmp_path: Path, lines: list[str], expected: str
) -> None:
    """The expression first, then classifiers, then the first line of free text."""
    distribution = package(tmp_path, *lines)
    assert licence_of(distribution) == expected
    assert table([distribution]).split() == ["abc", "1.0", *expected.split()]


def test_shipped_data_of_others_is_attributed() -> None:
    """Every folder of data or weights in the repository has a row; GeoNames is named."""
    text = ATTRIBUTIONS.read_text(encoding="utf-8")
    for where in ("example/corpus.jsonl", "example/data/", "example/smollm2/adapter/",
                  "tests/oracles/", "tests/verl/preflight/memory/models.json"):  # fmt: skip
        assert f"`{where}`" in text
        assert (ATTRIBUTIONS.parent / where).exists()
    assert "GeoNames" in text and "CC BY 4.0" in text
