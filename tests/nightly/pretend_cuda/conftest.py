"""Starts the matrix of trials with the session, on cores that other tests leave idle."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.nightly.pretend_cuda.matrix import CASES
from tests.nightly.pretend_cuda.trials import Outcomes, Trials

MATRIX = pytest.StashKey[Trials]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the trials if a test of the matrix is selected; only one of several processes does."""
    is_selected = any("test_trainer_matrix" in item.nodeid for item in session.items)
    if is_selected and not session.config.option.collectonly:
        session.stash[MATRIX] = Trials(Path(os.environ["PRETENDED"]), CASES)


@pytest.fixture(scope="session")
def matrix(request: pytest.FixtureRequest) -> Outcomes:
    """Outcomes of `CASES`, in order."""
    return request.session.stash[MATRIX].outcomes()
