"""Starts the matrix of trials with the session: it computes on the core that other tests leave."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.pretend_cuda.matrix import CASES
from tests.pretend_cuda.trials import Outcomes, Trials

MATRIX = pytest.StashKey[Trials]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin at once, if a test of the matrix was chosen; of several processes one does."""
    is_chosen = any("test_trainer_matrix" in item.nodeid for item in session.items)
    if is_chosen and not session.config.option.collectonly:
        session.stash[MATRIX] = Trials(Path(os.environ["PRETENDED"]), CASES)


@pytest.fixture(scope="session")
def matrix(request: pytest.FixtureRequest) -> Outcomes:
    """The outcome of each of `CASES`."""
    return request.session.stash[MATRIX].outcomes()
