"""KL and entropy of a trained policy, against plain formulas."""

import pytest
import torch

from benchmarks.algorithms.distance import distance, policy_positions
from example.tiny import tiny_llama
from verl.types import Origin, Prompt, Segment, Trajectory

TRAJECTORY = Trajectory(
    Prompt("p", (1, 2, 3), "s", ("x",)),
    [
        Segment(Origin.PROMPT, (1, 2, 3)),
        Segment(Origin.POLICY, (4, 5), "", (0.0, 0.0)),
        Segment(Origin.OBSERVATION, (6, 7)),
        Segment(Origin.POLICY, (8,), "", (0.0,)),
    ],
)


def test_only_tokens_that_the_policy_sampled_count():
    """Tokens of the prompt and of documents are left out."""
    assert policy_positions(TRAJECTORY) == [3, 4, 7]


def test_the_distance_is_the_formula_at_the_positions_before_each_token():
    """KL and entropy by torch.distributions, at the logits that predict tokens 3, 4 and 7.

    A trajectory without policy tokens, padded to the other's length, adds nothing.
    """
    policy, base = tiny_llama(50, seed=1), tiny_llama(50, seed=2)
    short = Trajectory(TRAJECTORY.prompt, TRAJECTORY.segments[:1])
    measured = distance(policy, base, [short, TRAJECTORY])
    with torch.no_grad():
        p, q = (
            torch.distributions.Categorical(
                logits=model(torch.tensor([TRAJECTORY.ids])).logits[0, [2, 3, 6]]
            )
            for model in (policy, base)
        )
    expected = torch.distributions.kl_divergence(p, q).mean()
    assert measured.kl == pytest.approx(float(expected), rel=1e-4)
    assert measured.entropy == pytest.approx(float(p.entropy().mean()), rel=1e-4)
    assert distance(base, base, [TRAJECTORY]).kl == pytest.approx(0.0, abs=1e-6)
