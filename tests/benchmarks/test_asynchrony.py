"""The figures that the asynchrony benchmark reads from the metrics of its runs."""

import json
from pathlib import Path

import pytest

from benchmarks.asynchrony import LongRun, compare, interval
from verl.errors import ConfigError


def step(number: int, **metrics: float) -> dict[str, float]:
    """Return the logged row of one step; `val_em` stands for the metric `val/em`."""
    row = {"step": number, "timing_s/step": 2.0, "rollout/staleness/mean": 3.0, "guard/health": 0.0}
    return row | {name.replace("_", "/"): value for name, value in metrics.items()}


def write_metrics(folder: Path, rows: list[dict[str, float]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("third", "collapses"),
    [({"val_em": 0.76}, []), ({"val_em": 0.74}, [3]), ({"guard_health": 2.0}, [3]),
     ({"guard_health": 1.0}, [])],
)  # fmt: skip
def test_a_collapse_is_a_verdict_of_the_guard_or_a_fallen_em(
    tmp_path: Path, third: dict[str, float], collapses: list[int]
) -> None:
    """An EM below three quarters of the best is a collapse; a warning of the guard is not."""
    rows = [{"step": 0, "val/em": 0.2}, step(1), step(2, val_em=1.0), step(3, **third)]
    write_metrics(tmp_path, rows)
    result = LongRun.read(7, tmp_path)
    assert (result.seed, result.steps, result.em[:2]) == (7, 3, [0.2, 1.0])
    assert (result.collapses, result.seconds, result.staleness) == (collapses, 6.0, 3.0)


def write_pair(out: Path, seconds: dict[str, float]) -> None:
    """Write the runs of seed 0: a validation after each of three steps, and the timed steps."""
    for name, step_s in seconds.items():
        folder = out / name / "seed_0"
        write_metrics(
            folder / "curve", [{"step": n, "val/em": em} for n, em in enumerate((0.2, 0.5, 0.8))]
        )
        times = {"timing_s/step": step_s, "timing_s/gen": 1.0, "perf/engine_busy_share": 0.5}
        write_metrics(folder / "timed", [{"step": n, **times} for n in (1, 2)])


def test_the_speedup_is_the_ratio_of_the_seconds_until_both_reach_the_em(tmp_path: Path) -> None:
    """Two steps of 6 s against two of 3 s; the interval of one seed is its value."""
    write_pair(tmp_path, {"sync": 6.0, "async": 3.0})
    result = compare(tmp_path, [0], 0.8)
    assert (result["speedup_to_equal_em"], result["interval_95"]) == (2.0, [2.0, 2.0])


@pytest.mark.parametrize("em", [0.9, 0.2])
def test_an_em_that_training_does_not_reach_is_reported(tmp_path: Path, em: float) -> None:
    """Neither an EM that no validation reaches nor one that the initial policy has is accepted."""
    write_pair(tmp_path, {"sync": 6.0, "async": 3.0})
    with pytest.raises(ConfigError, match=r"EM 0\.2, 0\.5, 0\.8; expected.*fix: choose another"):
        compare(tmp_path, [0], em)


def test_the_interval_of_any_number_of_seeds_is_students() -> None:
    """Seven seeds: the 97.5 % quantile with six degrees of freedom is 2.447 (from a table)."""
    low, high = interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    half = 2.447 * (28 / 6) ** 0.5 / 7**0.5
    assert (low, high) == pytest.approx((4 - half, 4 + half), abs=1e-3)
