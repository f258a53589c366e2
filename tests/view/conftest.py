"""Fixtures with a recorded run."""

from collections.abc import Callable
from pathlib import Path

import pytest

from search_r1.view.run import Run
from tests.runs import written as runs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's folder with two steps and a validation."""
    return runs.write_run(tmp_path / "run")


@pytest.fixture
def open_run(tmp_path: Path) -> Callable[[Path], Run]:
    """A function that opens the run in a folder and reads it to the end."""

    def opened(folder: Path) -> Run:
        run = Run(folder, tmp_path / "index")
        run.refresh()
        return run

    return opened


@pytest.fixture
def run(folder: Path, open_run: Callable[[Path], Run]) -> Run:
    """The run in `folder`, opened and read."""
    return open_run(folder)
