"""Manifests: old versions are read; encoders are compared by the direction of a vector."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from search_r1.retrieval.corpus import Fingerprint
from search_r1.retrieval.errors import IndexMismatch
from search_r1.retrieval.manifest import Manifest
from search_r1.retrieval.probes import check_probe

OLD = {
    "engine": "e5",
    "corpus": {"count": 3, "size": 99, "digest": "ab"},
    "count": 3,
    "dtype": "float32",
    "encoder": "e5-base-v2",
    "pooling": "mean",
    "dim": 2,
    "probe": [0.6, 0.8],
}
"""A manifest of the first version."""


def test_manifests_of_the_first_version_load(tmp_path: Path) -> None:
    """Fields added later get the values that applied to the first version."""
    (tmp_path / "manifest.json").write_text(json.dumps(OLD))
    manifest = Manifest.load(tmp_path)
    assert manifest.corpus == Fingerprint(3, 99, "ab") and manifest.probe == (0.6, 0.8)
    assert (manifest.factory, manifest.normalizes, manifest.max_length) == ("Flat", True, None)
    manifest.save(tmp_path)
    assert Manifest.load(tmp_path) == manifest


def test_files_are_compared_with_the_manifest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another size is found at each start, other content by `whole`; no hashes are a warning."""
    path = tmp_path / "index" / "vectors"
    path.parent.mkdir()
    path.write_bytes(b"abc")
    Manifest("x", Fingerprint(1, 1, ""), 1).save(path.parent)
    manifest = Manifest.load(path.parent)
    manifest.check_files(path.parent, whole=True)
    for content, is_found in ((b"abd", False), (b"ab", True), (None, True)):
        path.unlink() if content is None else path.write_bytes(content)
        with nullcontext() if not is_found else pytest.raises(IndexMismatch):
            manifest.check_files(path.parent, whole=False)
        with pytest.raises(IndexMismatch):
            manifest.check_files(path.parent, whole=True)
    replace(manifest, files={}).check_files(path.parent, whole=True)
    assert "no hashes" in caplog.text


@pytest.mark.parametrize(
    ("probe", "fits"),
    [((3.0, 4.0), True), ((6.0, 8.1), True), ((4.0, 3.0), False), ((3.0, 4.0, 0.0), False)],
)
def test_probes_are_compared_by_their_direction(
    tmp_path: Path, probe: tuple[float, ...], fits: bool
) -> None:
    """The comparison does not depend on the length of the vectors."""
    manifest = Manifest("x", Fingerprint(1, 1, ""), 1, dim=2, probe=(3.0, 4.0))
    if fits:
        check_probe(manifest, tmp_path, "x", probe)
    else:
        with pytest.raises(IndexMismatch, match="--retriever_model"):
            check_probe(manifest, tmp_path, "x", probe)
