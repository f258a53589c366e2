"""What counts as caught in time, on courses written by hand."""

import pytest

from tests.proofs.collapse import Course


def course(ems: list[float], health: list[float]) -> Course:
    """Validation at steps 0, 1 …; verdicts from step 1 on."""
    rows = [{"step": float(i), "val/em": em} for i, em in enumerate(ems)]
    for row, verdict in zip(rows[1:], health, strict=True):
        row["guard/health"] = verdict
    return Course("run", rows)


@pytest.mark.parametrize(
    ("ems", "health", "caught", "in_time"),
    [
        ([0.4, 0.0], [2], 1, True),  # the verdict comes before the validation of its step
        ([0.4, 0.5, 0.4, 0.1], [0, 1, 2], 3, True),
        ([0.4, 0.5, 0.3, 0.1], [0, 1, 2], 3, False),  # 0.3 is below three quarters of 0.5
        ([0.4, 0.1, 0.0], [1, 1], None, False),
        ([0.0, 0.0], [2], 1, False),  # nothing to lose
    ],
)
def test_caught_in_time_is_before_a_quarter_is_lost(
    ems: list[float], health: list[float], caught: int | None, in_time: bool
) -> None:
    """Every validation that came before the verdict counts, none that came after."""
    found = course(ems, health)
    assert found.caught == caught
    assert found.is_caught_in_time is in_time


def test_the_table_has_a_line_a_step() -> None:
    """What a step did not log stays empty."""
    assert course([0.4, 0.0], [2]).table().row_count == 2
