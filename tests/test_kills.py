"""A run that is killed repeatedly ends with the result of an undisturbed run."""

from pathlib import Path

import pytest

from tests.nightly.proofs.kills.__main__ import main

pytestmark = pytest.mark.vllm_cpu


@pytest.mark.slow
def test_nothing_is_lost_to_kills(tmp_path: Path) -> None:
    """Five kills, one of each kind of process, leave metrics, weights and machine unharmed.

    The full proof is `python -m tests.nightly.proofs.kills --kills 20`.
    """
    assert main(["--kills", "5", "--seed", "1", "--out", str(tmp_path)]) == 0
