"""The guard's rules on hand-written series, and its choice of correct trajectories."""

from __future__ import annotations

import json
import math
import pickle
import random
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
import torch

from verl.batch import TokenBatch
from verl.config import GuardConfig
from verl.errors import CollapseError, MismatchError
from verl.ext.guard import (
    BLANK_RESULTS,
    DRIFT,
    EMPTY_RESULTS,
    ENTROPY,
    GRAD_NORM,
    LENGTH_CLIP,
    MALFORMED,
    MISMATCH,
    NO_ANSWER,
    REPETITION,
    SCORE_GAP,
    SHIFT,
    SKIPPED,
    TOOL_USE,
    TURN_TOKENS,
    WINDOW,
    CollapseGuard,
    correct_sequences,
    correct_trajectories,
    drift_and_shift,
    measure,
    repetition,
    rules,
    score_gap,
)
from verl.rewards.interface import Reward
from verl.types import Origin, Prompt, Segment, Status, Trajectory

USUAL = {
    DRIFT: 0.01, SHIFT: 0.001, MALFORMED: 0.05, NO_ANSWER: 0.05, LENGTH_CLIP: 0.02, TOOL_USE: 0.9,
    ENTROPY: 0.3, GRAD_NORM: 0.5, SKIPPED: 0.0, TURN_TOKENS: 40.0, REPETITION: 0.05,
    SCORE_GAP: 1.0,
}  # fmt: skip
BREAKS = [
    ("drift_drop", DRIFT, -0.31, -0.29),
    ("score_gap_drop", SCORE_GAP, -0.01, 0.0),
    ("malformed_rise", MALFORMED, 0.36, 0.34),
    ("no_answer_rise", NO_ANSWER, 0.36, 0.34),
    ("length_clip_rise", LENGTH_CLIP, 0.33, 0.31),
    ("turn_tokens_growth", TURN_TOKENS, 121.0, 119.0),
    ("turn_tokens_share", TURN_TOKENS, 7.9, 8.1),
    ("repetition_rise", REPETITION, 0.36, 0.34),
    ("search_share", TOOL_USE, 0.08, 0.10),
    ("entropy_share", ENTROPY, 0.02, 0.04),
    ("entropy_rise", ENTROPY, 1.31, 1.29),
    ("grad_norm_growth", GRAD_NORM, 5.1, 4.9),
    ("skipped_updates", SKIPPED, 0.5, 0.0),
    ("empty_results", EMPTY_RESULTS, 0.91, 0.89),
    ("blank_results", BLANK_RESULTS, 0.51, 0.49),
]
"""Rule, metric, a value just beyond its bound after `USUAL` steps, one just within."""


def new(config: GuardConfig) -> CollapseGuard:
    return CollapseGuard(config, Path("no checkpoints"))


def healths(guard: CollapseGuard, steps: Iterable[Mapping[str, float]]) -> list[str]:
    return [guard.observe(metrics).health for metrics in steps]


@pytest.mark.parametrize(("name", "metric", "beyond", "within"), BREAKS)
def test_three_steps_beyond_a_bound_are_a_collapse(
    name: str, metric: str, beyond: float, within: float
) -> None:
    """Two steps warn, the third is a collapse; a value just within the bound does nothing."""
    guard = new(GuardConfig())
    assert healths(guard, [USUAL] * 5) == ["healthy"] * 5
    assert not guard.observe({**USUAL, metric: within}).reasons
    verdicts = [guard.observe({**USUAL, metric: beyond}) for _ in range(3)]
    assert [v.health for v in verdicts] == ["warning", "warning", "collapsed"]
    for part in (metric, name, f"{beyond:.3g}", "3 of 3"):
        assert part in str(verdicts[-1])


def test_tools_that_give_nothing_are_told_as_such() -> None:
    """The advice is to mend their server, and not to learn more slowly."""
    guard = new(GuardConfig(action="stop"))
    verdicts = [guard.observe({**USUAL, EMPTY_RESULTS: 1.0}) for _ in range(3)]
    with pytest.raises(CollapseError, match=r"tools give the policy nothing at step 7.*servers"):
        guard.require_health(7, verdicts[-1])


def test_a_reward_that_pays_wrong_answers_is_told_as_such() -> None:
    """The advice is to correct the reward; a bound of 0 is written as 0."""
    guard = new(GuardConfig(action="stop"))
    verdicts = [guard.observe({**USUAL, SCORE_GAP: -0.5}) for _ in range(3)]
    with pytest.raises(CollapseError, match=r"at step 7: .*below 0 \(rule.*correct the reward"):
        guard.require_health(7, verdicts[-1])


def test_every_rule_is_tried() -> None:
    """The table above has all rules except the four that need less patience."""
    names = {rule.name for rule in rules(GuardConfig())}
    assert names == {b[0] for b in BREAKS} | {
        "drift_crash", "shift_bound", "shift_crash", "mismatch_bound"
    }  # fmt: skip


def test_two_large_policy_shifts_are_a_collapse() -> None:
    """No baseline is needed, and a third such step would be too late."""
    guard = new(GuardConfig())
    steps = ({**USUAL, SHIFT: shift} for shift in (0.02, 0.009, 0.011, 0.011))
    expected = ["warning", "healthy", "warning", "collapsed"]
    assert healths(guard, steps) == expected
    assert new(GuardConfig()).observe({**USUAL, SHIFT: 0.051}).is_collapsed


def test_a_crash_of_correct_trajectories_is_a_collapse_at_once() -> None:
    """A loss of one nat per token counts even in the first step of a run, without a baseline."""
    verdict = new(GuardConfig()).observe({DRIFT: -1.1})
    assert verdict.is_collapsed
    assert "drift_crash" in str(verdict)


def test_engines_that_disagree_are_a_mismatch_and_no_collapse() -> None:
    """Also where the drift looks like a crash: it compares the same log-probs."""
    guard = new(GuardConfig(action="stop"))
    assert guard.observe({**USUAL, MISMATCH: 0.4}).health == "healthy"
    verdict = guard.observe({**USUAL, MISMATCH: 3.5, DRIFT: -3.5})
    assert verdict.health == "mismatch"
    assert len(verdict.reasons) == 3 and "mismatch_bound" in verdict.reasons[0]
    with pytest.raises(MismatchError, match="at step 7"):
        guard.require_health(7, verdict)


@pytest.mark.parametrize("seed", range(20))
def test_a_noisy_healthy_run_is_never_called_collapsed(seed: int) -> None:
    """Small batches, falling entropy, more searches and spikes rarely warn, and never collapse.

    36 trajectories of two turns per step; entropy falls to a tenth over the run, the gradient norm
    varies by a factor of five and spikes once.
    """
    rng = random.Random(seed)

    def share(p: float, count: int) -> float:
        return sum(rng.random() < p for _ in range(count)) / count

    steps = [
        {
            DRIFT: rng.gauss(0.01, 0.05),
            MALFORMED: share(0.15, 72),
            NO_ANSWER: share(0.1, 36),
            LENGTH_CLIP: share(0.05, 72),
            TOOL_USE: share(0.3 + 0.6 * t / 200, 36),
            ENTROPY: 0.3 * 10 ** (-t / 200) * rng.uniform(0.7, 1.4),
            GRAD_NORM: 16.0 if t == 100 else rng.uniform(0.15, 0.8),
            SKIPPED: 0.0,
        }
        for t in range(200)
    ]
    verdicts = healths(new(GuardConfig()), steps)
    assert "collapsed" not in verdicts
    assert verdicts.count("warning") <= 3
    assert verdicts[100] == "warning"


def test_a_base_model_that_does_not_know_the_tags_yet_is_healthy() -> None:
    """Rates near 1 at the start break no rule; a return to them after learning does."""
    guard = new(GuardConfig())
    at_start = {MALFORMED: 0.95, NO_ANSWER: 0.9, LENGTH_CLIP: 0.8}
    assert set(healths(guard, [at_start] * 5)) == {"healthy"}
    learning = [{MALFORMED: 0.95 * 0.7**t} for t in range(20)]
    assert set(healths(guard, learning)) == {"healthy"}
    assert healths(guard, [at_start] * 3)[-1] == "collapsed"


def test_a_sudden_loss_of_form_is_caught_however_early() -> None:
    """One healthy step suffices as a baseline."""
    guard = new(GuardConfig())
    verdicts = healths(guard, [USUAL, *([{**USUAL, MALFORMED: 1.0}] * 3)])
    assert verdicts == ["healthy", "warning", "warning", "collapsed"]


def test_a_good_step_resets_the_count() -> None:
    """Three bad steps that are not in a row are no collapse."""
    bad = {**USUAL, NO_ANSWER: 0.9}
    verdicts = healths(new(GuardConfig()), [USUAL, bad, bad, USUAL, bad, bad, USUAL])
    assert "collapsed" not in verdicts


def test_bad_steps_do_not_become_the_baseline() -> None:
    """A collapse stays one, however long it lasts."""
    guard = new(GuardConfig())
    verdicts = healths(guard, [USUAL, *([{**USUAL, MALFORMED: 0.9}] * 20)])
    assert set(verdicts[3:]) == {"collapsed"}
    assert guard.baseline(MALFORMED) == USUAL[MALFORMED]


def test_the_baseline_is_the_median_of_the_latest_healthy_steps() -> None:
    """It follows slow changes, and single values do not move it."""
    guard = new(GuardConfig())
    healths(guard, [{ENTROPY: entropy} for entropy in [0.9] * 9 + [0.1] + [0.6] * 7])
    assert guard.baseline(ENTROPY) == 0.6


def test_a_missing_metric_neither_counts_nor_resets() -> None:
    """Without a correct trajectory there is no drift to judge; the next one continues the count."""
    falling, without = {DRIFT: -0.5}, {MALFORMED: 0.1}
    verdicts = healths(new(GuardConfig()), [falling, without, falling, without, falling])
    expected = ["warning", "healthy", "warning", "healthy", "collapsed"]
    assert verdicts == expected


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("metric", [DRIFT, GRAD_NORM, ENTROPY])
def test_a_value_that_is_not_finite_breaks_every_rule(metric: str, value: float) -> None:
    """This also holds in the first step; such a value never enters a baseline."""
    guard = new(GuardConfig())
    verdict = guard.observe({metric: value})
    assert verdict.reasons
    assert "not finite" in str(verdict)
    assert guard.baseline(metric) is None


def test_null_turns_a_rule_off() -> None:
    """Each limit can be removed separately."""
    quiet = GuardConfig(limits={"malformed_rise": None, "drift_crash": None})
    assert {"malformed_rise", "drift_crash"}.isdisjoint(rule.name for rule in rules(quiet))
    verdicts = healths(new(quiet), [USUAL, *([{**USUAL, MALFORMED: 1.0}] * 5)])
    assert set(verdicts) == {"healthy"}


def test_a_resumed_guard_judges_like_an_uninterrupted_one() -> None:
    """Baselines and counts go through JSON, as in a checkpoint."""
    series = [USUAL] * 3 + [{**USUAL, TOOL_USE: 0.0}] * 2
    unbroken, resumed = new(GuardConfig()), new(GuardConfig())
    healths(unbroken, series)
    resumed.load_state_dict(json.loads(json.dumps(unbroken.state_dict()["guard"])))
    assert unbroken.observe(series[-1]) == resumed.observe(series[-1])
    assert resumed.observe(series[-1]).is_collapsed


def test_growth_from_nothing_is_no_collapse() -> None:
    """While no sample is correct there is no gradient; the first gradients are healthy."""
    verdicts = healths(new(GuardConfig()), [{GRAD_NORM: 0.0}] * 10 + [{GRAD_NORM: 0.5}] * 5)
    assert set(verdicts) == {"healthy"}


def batch(scores: list[float]) -> TokenBatch:
    """Return one trajectory per score: prompt, policy (log-prob -1), observation, policy (-2)."""
    prompt = Prompt("q", (1, 2), "nq", ("a",))
    segments = [
        Segment(Origin.PROMPT, prompt.ids),
        Segment(Origin.POLICY, (3,), "x", (-1.0,)),
        Segment(Origin.OBSERVATION, (4, 5), "doc"),
        Segment(Origin.POLICY, (6,), "y", (-2.0,)),
    ]
    trajectories = TokenBatch.from_trajectories([Trajectory(prompt, segments) for _ in scores])
    trajectories.rows["scores"] = torch.tensor(scores)
    return trajectories


@pytest.mark.parametrize(
    ("scores", "limit", "expected"),
    [
        ([0.0, 1.0, 0.0, 1.0], 16, [1, 3]),
        ([0.2, 1.0, 0.5, 0.4], 16, [1, 2]),  # at least half the best
        ([-1.0, -0.5, 0.0], 16, []),  # nothing is correct
        ([1.0] * 9, 3, [0, 3, 6]),  # evenly over the batch
        ([1.0, 1.0], 0, []),
        ([], 16, []),
    ],
)
def test_correct_is_half_the_best_score_and_positive(
    scores: list[float], limit: int, expected: list[int]
) -> None:
    """Format scores of wrong answers, penalties and empty batches yield no trajectory."""
    assert correct_sequences(torch.tensor(scores), limit) == expected


def test_drift_is_the_mean_over_policy_tokens() -> None:
    """Prompt and observation tokens are not included, whatever their log-probs."""
    again = correct_trajectories(batch([1.0, 0.0, 1.0]), 16)
    assert len(again) == 2
    after = torch.tensor([9.0, 9.0, -1.5, 9.0, 9.0, -4.0] * 2)
    assert drift_and_shift(again, after)[0] == pytest.approx((-0.5 - 2.0) / 2)


def test_trajectories_without_engine_log_probs_are_left_out() -> None:
    """There is nothing to compare with; other trajectories are still used."""
    trajectories = batch([1.0, 1.0])
    trajectories.tokens["rollout_log_probs"][2] = math.nan
    assert len(correct_trajectories(trajectories, 16)) == 1
    trajectories.tokens["rollout_log_probs"][8] = math.nan
    assert len(correct_trajectories(trajectories, 16)) == 0


def test_the_shift_includes_changes_that_cancel_in_the_drift() -> None:
    """Equal gains and losses leave the drift at 0; the shift is the mean of e^m − 1 − m."""
    again = correct_trajectories(batch([1.0]), 16)
    moves = [0.4, -0.4]
    mask, before = again.tokens["policy_mask"], again.tokens["rollout_log_probs"]
    after = torch.full_like(before, 9.0)
    after[mask] = before[mask] + torch.tensor(moves)
    assert drift_and_shift(again, after)[0] == pytest.approx(0.0, abs=1e-6)
    expected = sum(math.exp(m) - 1 - m for m in moves) / 2
    assert drift_and_shift(again, after)[1] == pytest.approx(expected, rel=1e-5)


def test_the_second_forward_pass_needs_no_column_of_the_loss() -> None:
    """Only ids, origin and engine log-probs are sent, so the loss mask has no effect."""
    full = batch([1.0])
    full.tokens["loss_mask"] = torch.zeros(full.num_tokens, dtype=torch.bool)
    assert correct_trajectories(full, 16).tokens.keys() == {
        "input_ids",
        "policy_mask",
        "rollout_log_probs",
    }


QUESTION = Prompt("q", (1,), "nq", ("a",))


def counted(status: Status, *counts: float) -> Trajectory:
    """Return a trajectory with the agent's counts: turns, calls, malformed and truncated turns."""
    names = ("turns", "valid_actions", "malformed_turns", "truncated_turns")
    stats = dict(zip(names, counts, strict=False))
    if "valid_actions" in stats:
        stats["answered"] = float(status is Status.ANSWERED)
        stats["valid_actions"] += stats["answered"]
    return Trajectory(QUESTION, [], status, stats)


def test_behaviour_is_counted_over_turns_and_trajectories() -> None:
    """Malformed and truncated by turn, calls and answers by trajectory, without failed ones."""
    trajectories = [
        counted(Status.ANSWERED, 3, 2, 0, 0),
        counted(Status.OUT_OF_TURNS, 4, 0, 3, 2),
        counted(Status.OUT_OF_BUDGET, 1, 1, 1, 0),
        counted(Status.FAILED, 9, 9, 9, 9),
    ]
    expected = {NO_ANSWER: 2 / 3, TOOL_USE: 2 / 3, MALFORMED: 4 / 8, LENGTH_CLIP: 2 / 8}
    assert measure(trajectories) == expected


def test_an_agent_without_such_counts_has_fewer_metrics() -> None:
    """The trainer does not derive counts that the agent does not report."""
    trajectories = [counted(Status.ANSWERED), counted(Status.OUT_OF_TURNS)]
    assert measure(trajectories) == {NO_ANSWER: 0.5}


def test_a_batch_of_failures_has_no_behaviour() -> None:
    """Failures of the infrastructure never look like a collapse."""
    assert measure([counted(Status.FAILED, 1)]) == {}


def test_the_gap_is_that_of_mean_scores_where_all_outcomes_are_known() -> None:
    """A reward of the wrong sign has a negative one at once."""
    rewards = [Reward(0.8, {}, True), Reward(1.0, {}, True), Reward(0.3, {}, False)]
    assert score_gap(rewards) == {SCORE_GAP: pytest.approx(0.6)}
    assert score_gap([Reward(-r.score, {}, r.is_right) for r in rewards])[SCORE_GAP] < 0
    assert score_gap([*rewards, Reward(0.0, {}, None)]) == {}
    assert score_gap(rewards[:2]) == score_gap([]) == {}


def policy(*ids: int) -> Segment:
    return Segment(Origin.POLICY, ids, "", (0.0,) * len(ids))


@pytest.mark.parametrize("seed", range(5))
def test_repetition_is_the_share_of_windows_seen_before(seed: int) -> None:
    """Against a loop with a set; two letters make repeated windows likely."""
    draw = random.Random(seed)
    ids = [draw.randrange(2) for _ in range(draw.randrange(WINDOW, 200))]
    seen: set[tuple[int, ...]] = set()
    repeated = 0
    windows = [tuple(ids[i : i + WINDOW]) for i in range(len(ids) - WINDOW + 1)]
    for window in windows:
        repeated += window in seen
        seen.add(window)
    cut = draw.randrange(len(ids))
    assert repetition([policy(*ids[:cut]), policy(*ids[cut:])]) == pytest.approx(
        repeated / len(windows)
    )
    assert repetition([policy(*ids[: WINDOW - 1])]) == 0.0


def test_what_the_policy_writes_is_measured_by_turn_without_documents() -> None:
    """A loop in the documents is none of the policy's; a pickled segment counts as it is."""
    documents = Segment(Origin.OBSERVATION, (7,) * 50)
    looped = Trajectory(QUESTION, [policy(*[5] * 27), documents, policy(1, 2, 3)])
    plain = Trajectory(QUESTION, [policy(*range(10))])
    restored = pickle.loads(pickle.dumps([looped, plain]))
    for trajectories in ([looped, plain], restored):
        measured = measure(trajectories)
        assert measured[TURN_TOKENS] == 40 / 3
        assert measured[REPETITION] == pytest.approx((19 / 23 + 0) / 2)
