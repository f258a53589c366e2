"""What the driver makes of the answers of all ranks about a checkpoint."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from verl.errors import SaveError
from verl.trainer.groups import TrainerRanks


class Answers:
    """A group whose ranks give the same answers to whatever is called."""

    def __init__(self, answers: Sequence[Any]) -> None:
        self.answers = answers

    def call(self, method: str, *arguments: Any) -> list[Any]:
        return list(self.answers)


@pytest.mark.parametrize(("second_host", "fits"), [(79, True), (81, False)])
def test_a_copy_must_fit_on_every_host(second_host: int, fits: bool) -> None:
    """Shards of a host's ranks add up; a fifth of its free memory is left alone."""
    room = [("a", 10, 100), ("a", 10, 100), ("b", second_host - 40, 100), ("b", 40, 100)]
    assert TrainerRanks(Answers(room)).can_copy_checkpoint() is fits


def test_one_rank_that_could_not_write_fails_the_checkpoint(tmp_path: Path) -> None:
    """The error names the rank and its reason; where all wrote there is none."""
    TrainerRanks(Answers(["", ""])).finish_checkpoint()
    failing = TrainerRanks(Answers(["", "OSError: No space left on device"]))
    for save in (failing.finish_checkpoint, lambda: failing.save_checkpoint(tmp_path)):
        with pytest.raises(SaveError, match="rank 1: OSError: No space left"):
            save()
