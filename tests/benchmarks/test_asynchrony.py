"""What a long run's metrics say of a collapse."""

import json
from pathlib import Path

import pytest

from benchmarks.asynchrony import Course


def step(number: int, **more: float) -> dict[str, float]:
    row = {"step": number, "timing_s/step": 2.0, "rollout/staleness/mean": 3.0, "guard/health": 0.0}
    return row | {name.replace("_", "/"): x for name, x in more.items()}


@pytest.mark.parametrize(
    ("third", "collapses"),
    [({"val_em": 0.76}, []), ({"val_em": 0.74}, [3]), ({"guard_health": 2.0}, [3]),
     ({"guard_health": 1.0}, [])],
)  # fmt: skip
def test_a_collapse_is_what_the_guard_or_a_fallen_em_says(
    tmp_path: Path, third: dict[str, float], collapses: list[int]
) -> None:
    """Below three quarters of the best so far; a warning is none."""
    rows = [{"step": 0, "val/em": 0.2}, step(1), step(2, val_em=1.0), step(3, **third)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    course = Course.of(7, tmp_path)
    assert (course.seed, course.steps, course.em[:2]) == (7, 3, [0.2, 1.0])
    assert (course.collapses, course.seconds, course.staleness) == (collapses, 6.0, 3.0)
