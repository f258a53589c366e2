"""The matrix on simulated GPUs: its trials are computed beside the other tests, and read last."""

import os
import tempfile
from pathlib import Path

import pytest

from tests.nightly.pretend_cuda.stopping import stop

MATRIX = "test_trainer_matrix.py"


def pytest_configure(config: pytest.Config) -> None:
    """Create the folder that all processes of the session share."""
    if not hasattr(config, "workerinput"):
        os.environ["PRETENDED"] = tempfile.mkdtemp(prefix="pretended-")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Stop the trials that still run."""
    if not hasattr(session.config, "workerinput"):
        stop(Path(os.environ["PRETENDED"]))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the matrix last, so that no test waits for the simulated GPUs."""
    items.sort(key=lambda item: MATRIX in item.nodeid)
