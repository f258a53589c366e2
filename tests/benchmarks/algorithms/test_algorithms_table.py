"""The table of the algorithms' benchmark, from constructed results."""

from benchmarks.algorithms.runner import Result
from benchmarks.algorithms.table import markdown, mask_verdict, mean_and_range, steps_cell, steps_to


def result(curve: list[tuple[int, float]], seed: int = 0) -> Result:
    """Return the result of a run with this curve."""
    return Result(
        seed=seed,
        options=[],
        curve=curve,
        searches=1.5,
        sampled_em=0.4,
        kl=0.1,
        entropy=0.2,
        train_seconds=10.0,
        wall_seconds=20.0,
    )


def test_the_threshold_is_met_at_the_first_step_that_reaches_it():
    """An equal EM counts, a later decrease does not matter, and a run may never reach it."""
    assert steps_to([(0, 0.2), (4, 0.75), (8, 0.6)], 0.75) == 4
    assert steps_to([(0, 0.2), (4, 0.74)], 0.75) is None


def test_a_mean_is_shown_with_the_range_of_the_seeds():
    """Three seeds give mean and range; one seed gives its value."""
    assert mean_and_range([1.0, 2.0, 6.0], 1) == "3.0 (1.0 to 6.0)"
    assert mean_and_range([0.25], 2) == "0.25"


def test_seeds_that_never_reach_the_threshold_are_counted_and_not_averaged():
    """A mean over the successful seeds alone would favour an algorithm that often fails."""
    reached, missed = result([(0, 0.1), (6, 0.8)]), result([(0, 0.1), (6, 0.7)])
    assert steps_cell([reached, missed, reached]) == "6 (6 to 6), 1 of 3 never"
    assert steps_cell([missed]) == "never"


def test_the_table_has_a_row_per_variant_in_order_and_shows_missing_results():
    """A variant without a run keeps its row."""
    rows = markdown({"ppo": [result([(0, 0.5)])], "grpo": []}).splitlines()
    assert rows[2].startswith("| `ppo` | 1 | 0.500 | never |")
    assert rows[3].startswith("| `grpo` | – |")
    assert all(row.count("|") == rows[0].count("|") for row in rows[:4])


def test_the_mask_counts_as_better_only_if_every_seed_is():
    """Variants whose seeds overlap are reported as not clearly different."""
    high, middle, low = (result([(8, em)]) for em in (0.9, 0.7, 0.3))
    worse = mask_verdict({"grpo": [high, middle], "b": [low]}, "grpo", "b")
    assert worse.startswith("- `b` is clearly worse than `grpo` in final EM (0.300 against 0.800")
    overlapping = mask_verdict({"grpo": [high, low], "b": [middle]}, "grpo", "b")
    assert "`b` is **not** clearly worse in final EM" in overlapping
    assert mask_verdict({"grpo": [high]}, "grpo", "b") == ""


def test_a_slower_run_without_the_mask_is_worse_in_steps_alone():
    """If both end at the same EM, the number of steps to reach it is still compared."""
    fast, slow = result([(0, 0.2), (4, 0.8)]), result([(0, 0.2), (4, 0.5), (8, 0.8)])
    never = result([(0, 0.2), (8, 0.7)])
    assert "in steps (8 against 4), and **not** clearly" in mask_verdict(
        {"grpo": [fast], "b": [slow]}, "grpo", "b"
    )
    assert "steps (4 against never)" in mask_verdict({"grpo": [never], "b": [fast]}, "grpo", "b")
