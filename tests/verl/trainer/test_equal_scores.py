"""Equal scores give advantages of exactly 0 despite rounding: every estimator, by fractions."""

import math
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.verl.trainer.test_learn import trajectory
from verl.config import Config
from verl.core_algos.advantages import ADVANTAGES, STD_EPSILON
from verl.core_algos.kl import FixedKLController
from verl.rewards.interface import Reward
from verl.trainer.collect import Samples
from verl.trainer.learn import add_advantages, assemble, drop_zero_advantages

Score = tuple[float, Fraction]
"""A score as a reward computes it in floats, and its exact value."""
NAMES = [name for name, row in ADVANTAGES.items() if not row.needs_critic]


def costly(correct: int, searches: int, invalid: int) -> Score:
    """Return 1 for a correct answer, minus 0.1 per search and 0.3 per invalid turn."""
    exact = correct - Fraction(searches, 10) - Fraction(3 * invalid, 10)
    return correct - 0.1 * searches - 0.3 * invalid, exact


def f1_less_2(common: int, words: int) -> Score:
    return 2.0 * common / (common + words) - 2.0, Fraction(2 * common, common + words) - 2


a_score = st.one_of(
    st.builds(costly, st.integers(0, 1), st.integers(0, 4), st.integers(0, 2)),
    st.builds(f1_less_2, st.integers(0, 5), st.integers(1, 7)),
)
some_scores = st.lists(a_score, min_size=1, max_size=2)
a_group = some_scores.flatmap(lambda few: st.lists(st.sampled_from(few), min_size=2, max_size=16))
groups = st.lists(a_group, min_size=1, max_size=3)


def samples_of(scores: Sequence[Sequence[Score]]) -> Samples:
    """Return a trajectory of one token per score."""
    rows = [(i, score) for i, group in enumerate(scores) for score in group]
    return Samples(
        [trajectory([(1, 0)], group=f"g{i}") for i, _ in rows],
        [Reward(score) for _, (score, _) in rows],
    )


def deviation(x: Sequence[Fraction]) -> float:
    mean = Fraction(sum(x), len(x))
    return math.sqrt(sum((one - mean) ** 2 for one in x) / max(len(x) - 1, 1))


def by_fractions(name: str, scores: Sequence[Sequence[Score]]) -> list[tuple[Fraction, float]]:
    """Return the exact numerator and the denominator of each trajectory's advantage.

    All trajectories have one policy token.
    """
    exact = [[value for _, value in group] for group in scores]
    means = [Fraction(sum(group), len(group)) for group in exact]
    centred = [one - mean for group, mean in zip(exact, means, strict=True) for one in group]
    all_scores = [one for group in exact for one in group]
    sizes = [len(group) for group in exact for _ in group]
    if name in ("grpo", "grpo_passk"):
        below = [deviation(group) + STD_EPSILON for group in exact for _ in group]
    elif name.startswith("reinforce_plus_plus"):
        whole = centred if name.endswith("baseline") else all_scores
        below = [math.sqrt(deviation(whole) ** 2 + 1e-8)] * len(whole)
    else:
        below = [1.0] * len(all_scores)
    match name:
        case "grpo" | "dr_grpo" | "opo" | "reinforce_plus_plus_baseline":
            above = centred
        case "rloo":
            above = [one * Fraction(n, n - 1) for one, n in zip(centred, sizes, strict=True)]
        case "grpo_passk":
            above = [
                max(own - max(group[:i] + group[i + 1 :]), Fraction(0))
                for group in exact for i, own in enumerate(group)
            ]  # fmt: skip
        case "reinforce":
            above = all_scores
        case "reinforce_baseline" | "reinforce_plus_plus":
            above = [own - Fraction(sum(all_scores), len(all_scores)) for own in all_scores]
        case _:
            raise AssertionError(name)
    return list(zip(above, below, strict=True))


@given(groups)
def test_advantages_are_those_of_fractions(scores: list[list[Score]]) -> None:
    """An advantage is 0 exactly if the fraction is 0, and close to the fraction otherwise.

    The ranks get no trajectories without advantage; dynamic sampling drops groups without any.
    """
    config, samples = Config(), samples_of(scores)
    batch = assemble(samples, config)
    for name in NAMES:
        config.algorithm.adv_estimator, config.algorithm.kl_ctrl.kl_coef = name, 0.0
        add_advantages(batch, config, FixedKLController(0.0))
        got, expected = batch.tokens["advantages"], by_fractions(name, scores)
        assert got.dtype == batch.tokens["returns"].dtype == torch.float32
        by_token = got[batch.tokens["policy_mask"]].tolist()
        assert [one == 0 for one in by_token] == [above == 0 for above, _ in expected], name
        divided = [float(above) / below for above, below in expected]
        assert by_token == pytest.approx(divided, rel=1e-6), name
        assert len(drop_zero_advantages(batch)) == sum(above != 0 for above, _ in expected)
    differ = [f"g{i}" for i, group in enumerate(scores) if len({exact for _, exact in group}) > 1]
    assert samples.groups_with_reward_variance() == differ
