"""The results of a sequence-parallel group, compared with those of a single rank."""

from pathlib import Path

import pytest
import torch

from scripts import family_page
from tests.verl.ext import sequence_parallel_bodies
from tests.verl.training.ranks import run_ranks, save_tiny
from verl.config import Config
from verl.errors import ConfigError
from verl.ext.sequence_parallel import check_divisible
from verl.training.actor import TokenBudgets
from verl.training.budgets import actor_budgets, critic_budgets


@pytest.mark.parametrize(
    ("options", "actor", "critic"),
    [
        ({}, (65536, 131072), (131072, 262144)),
        ({"ppo_max_token_len_per_gpu": 1000}, (4000, 8000), (8000, 16000)),
    ],
)  # fmt: skip
def test_a_group_holds_as_many_tokens_as_its_ranks(
    options: dict[str, int], actor: tuple[int, int], critic: tuple[int, int]
) -> None:
    """Token budgets are per rank; the critic's are twice the actor's."""
    config = Config()
    for name, value in options.items():
        setattr(config.actor_rollout_ref.actor, name, value)
    config.actor_rollout_ref.actor.ulysses_sequence_parallel_size = 4
    assert actor_budgets(config) == TokenBudgets(*actor)
    plan = config.placement
    assert (plan.actor.num_shards, plan.critic.num_shards, plan.critic.ranks_per_shard) == (2, 2, 4)
    assert critic_budgets(config) == TokenBudgets(*critic)


def test_layers_with_a_state_are_not_divided_over_ranks() -> None:
    """The option is named; other families are divided."""
    with pytest.raises(ConfigError, match="the_option"):
        check_divisible(family_page.family_config("lfm2"), 2, "the_option")
    check_divisible(family_page.family_config("llama"), 2, "the_option")


def test_a_group_has_the_results_and_the_gradient_of_one_rank() -> None:
    """In float64, with few key heads, a window, shared prompts, and slices without targets."""
    for by_case in run_ranks(2, sequence_parallel_bodies.compare):
        assert len(by_case) == len(sequence_parallel_bodies.CASES)
        for name, (alone, together) in by_case.items():
            for expected, actual in zip(alone, together, strict=True):
                for x, y in zip(expected, actual, strict=True):
                    scale = max(float(x.abs().max()), 1e-12) if x.numel() else 1.0
                    assert torch.allclose(x, y, rtol=0, atol=1e-12 * scale), name


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_groups_learn_what_one_rank_does(size: int, tmp_path: Path) -> None:
    """Outputs, metrics and weights after updates of actor and critic, in float32 on real ranks.

    Of two groups, which have different sequences, one has none at first.
    """
    model = save_tiny(tmp_path)
    (one,) = run_ranks(1, sequence_parallel_bodies.learn, model, 1)
    by_rank = run_ranks(size, sequence_parallel_bodies.learn, model, 2)
    for answers in by_rank:
        for mine, its in zip(answers["metrics"], one["metrics"], strict=True):
            uneven = {} if size == 2 else {k: its[k] for k in its if "num_micro" in k}
            assert mine | uneven == pytest.approx(its, rel=1e-5, abs=1e-7)
        for name in ("actor", "critic"):
            for key, x in one[name].items():
                torch.testing.assert_close(answers[name][key], x, rtol=1e-4, atol=1e-5)
    for name in one["answers"]:
        expected = one["answers"][name].split(one["lengths"][name[1]])
        for rank, answers in enumerate(by_rank):
            parts = by_rank[0]["parts"][name[1]][rank // 2]
            mine = torch.cat([expected[i] for i in parts]) if parts else torch.zeros(0)
            torch.testing.assert_close(answers["answers"][name], mine, rtol=1e-5, atol=1e-5)
