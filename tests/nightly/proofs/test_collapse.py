"""When a collapse counts as caught in time, on example courses."""

import pytest

from tests.nightly.proofs.collapse import Course


def course(ems: list[float], health: list[float]) -> Course:
    """Return a course with validations at steps 0, 1 … and verdicts from step 1 on."""
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
    """Validations before the verdict count, later ones do not."""
    result = course(ems, health)
    assert result.caught == caught
    assert result.is_caught_in_time is in_time


def test_the_table_has_a_line_per_step() -> None:
    """Metrics that a step did not log are empty."""
    assert course([0.4, 0.0], [2]).table().row_count == 2
