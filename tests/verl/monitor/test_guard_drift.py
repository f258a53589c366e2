"""Which trajectories the guard looks at again, and how far their log-probs moved."""

import math

import pytest
import torch

from verl.monitor.guard import correct_sequences, correct_trajectories, drift_and_shift
from verl.types import Origin, Prompt, Segment, TokenBatch, Trajectory


def batch(scores: list[float]) -> TokenBatch:
    """One trajectory a score: prompt, policy (log-prob -1), observation, policy (-2)."""
    prompt = Prompt("q", (1, 2), "nq", ("a",))
    segments = [
        Segment(Origin.PROMPT, prompt.ids),
        Segment(Origin.POLICY, (3,), "x", (-1.0,)),
        Segment(Origin.OBSERVATION, (4, 5), "doc"),
        Segment(Origin.POLICY, (6,), "y", (-2.0,)),
    ]
    found = TokenBatch.from_trajectories([Trajectory(prompt, segments) for _ in scores])
    found.rows["scores"] = torch.tensor(scores)
    return found


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
    """Format scores of wrong answers, penalties and empty batches give no trajectory."""
    assert correct_sequences(torch.tensor(scores), limit) == expected


def test_drift_is_the_mean_over_policy_tokens_alone() -> None:
    """Prompt and observation tokens, whatever their log-probs, are not in it."""
    again = correct_trajectories(batch([1.0, 0.0, 1.0]), 16)
    assert len(again) == 2
    after = torch.tensor([9.0, 9.0, -1.5, 9.0, 9.0, -4.0] * 2)
    assert drift_and_shift(again, after)[0] == pytest.approx((-0.5 - 2.0) / 2)


def test_the_shift_sees_what_cancels_in_the_drift() -> None:
    """Tokens that gain and lose alike leave the drift at 0; the shift is e^m − 1 − m of each."""
    again = correct_trajectories(batch([1.0]), 16)
    moves = [0.4, -0.4]
    mask, before = again.tokens["policy_mask"], again.tokens["rollout_log_probs"]
    after = torch.full_like(before, 9.0)
    after[mask] = before[mask] + torch.tensor(moves)
    assert drift_and_shift(again, after)[0] == pytest.approx(0.0, abs=1e-6)
    expected = sum(math.exp(m) - 1 - m for m in moves) / 2
    assert drift_and_shift(again, after)[1] == pytest.approx(expected, rel=1e-5)


def test_the_second_look_needs_no_column_of_the_loss() -> None:
    """Only ids, origin and the engine's log-probs travel, so the mask of the loss has no effect."""
    full = batch([1.0])
    full.tokens["loss_mask"] = torch.zeros(full.num_tokens, dtype=torch.bool)
    assert correct_trajectories(full, 16).tokens.keys() == {
        "input_ids",
        "policy_mask",
        "rollout_log_probs",
    }
