"""A real Slurm for the tests in this folder that request it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.scripts.slurm.cluster import PACKAGES, Cluster, missing_programs, start_cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Slurm with two nodes."""
    missing = missing_programs()
    assert not missing, f"these tests want a Slurm, and {missing} are missing: {PACKAGES}"
    with start_cluster(tmp_path_factory.mktemp("slurm")) as started:
        yield started
