"""Self-distillation from a right sibling: pairs, log-probs, advantages, and TRL's gradient."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from example.tiny import tiny_llama
from tests.core.batches import make_groups
from tests.verl.trainer.test_learn import trajectory
from tests.verl.training.ranks import VOCAB
from tests.verl.training.test_actor import make_actor, plain_log_probs
from verl.batch import TokenBatch
from verl.config import Config
from verl.core_algos.chosen import policy_loss
from verl.core_algos.policy_losses import POLICY_LOSSES, PolicyLossInputs
from verl.errors import ConfigError
from verl.ext.distillation import log_ratio
from verl.ext.sibling import SiblingTeacher, teachers
from verl.packing import PREFIXES, common_prefixes, saved_token_share
from verl.rewards.interface import Reward
from verl.trainer.collect import Samples

TRL_LOSS = 0.8382188558688657
TRL_GRADIENT = [
    [-0.2231463018, 0.0980909108, 0.4079042812, -0.1385786528, -0.1442702374],
    [-0.0423048807, -0.0010820835, -0.1524311254, 0.0119910988, 0.1838269908],
]
"""TRL 1.16.0's generalized_jsd_loss(student, teacher, beta=1, reduction="sum") and its gradient."""
Outcomes = Sequence[Sequence[bool | None]]


def samples_of(groups: Outcomes) -> Samples:
    rows = [(f"g{i}", is_right) for i, group in enumerate(groups) for is_right in group]
    return Samples(
        [trajectory([(1, 0)], group) for group, _ in rows],
        [Reward(0.0, is_right=is_right) for _, is_right in rows],
    )


@given(
    st.lists(st.lists(st.sampled_from([None, False, True]), min_size=1, max_size=4), max_size=4),
    st.lists(st.integers(1, 9), min_size=16, max_size=16),
)
def test_a_plain_loop_finds_the_same_teachers(groups: Outcomes, lengths: list[int]) -> None:
    """The shortest other right dialogue of the group, if both fit into the context."""
    expected, first = [], 0
    for group in groups:
        for i in range(len(group)):
            right = [(lengths[first + j], j) for j in range(len(group)) if group[j] and j != i]
            if right and min(right)[0] + lengths[first + i] <= 12:
                expected.append((first + i, first + min(right)[1]))
        first += len(group)
    assert teachers(samples_of(groups), lengths[:first], 12) == expected


def trainer_of(batch: TokenBatch, groups: Outcomes, old: str) -> Any:
    """Return what a hook sees of a trainer whose rank is a tiny actor."""
    actor, config = make_actor(), Config()
    config.actor_rollout_ref.actor.old_log_probs = old
    config.trainer.share_prompts = PREFIXES in batch.columns

    def begin_forward(role: str, batch: TokenBatch) -> Callable[[], Tensor]:
        assert role == "actor"
        assert (saved_token_share(batch) > 0.2) == config.trainer.share_prompts
        return lambda: actor.log_probs(batch)

    timings = SimpleNamespace(phase=lambda name: nullcontext())
    current = SimpleNamespace(batch=batch, samples=samples_of(groups), timings=timings)
    ranks = SimpleNamespace(begin_forward=begin_forward)
    return SimpleNamespace(config=config, current=current, ranks=ranks)


@pytest.mark.usefixtures("single_rank")
@pytest.mark.parametrize("old", ["recompute", "engine"])
@pytest.mark.parametrize("is_shared", [False, True])
def test_advantages_equal_plain_transformers_on_both_dialogues(old: str, is_shared: bool) -> None:
    """The teacher reads the sibling and then the dialogue; all other advantages stay."""
    batch = make_groups([(30, [5, 3, 12]), (9, [3, 8]), (4, [6, 2])])
    tokens = batch.tokens
    tokens["loss_mask"] = tokens["response_mask"]  # also without state masking
    if is_shared:
        batch.columns[PREFIXES] = common_prefixes(batch)
    lm, before = tiny_llama(VOCAB), tokens["advantages"].clone()
    own, _ = plain_log_probs(lm, batch)
    if old == "recompute":
        tokens["old_log_probs"] = own.detach()
    trainer = trainer_of(batch, [[True, True, False], [False, False], [True, False]], old)
    hook, metrics = SiblingTeacher(0.25, None), dict[str, float]()
    with hook.during("prepare", trainer):
        pass
    hook.on_trained(trainer, metrics)
    ids, spans = tokens["input_ids"], batch.spans(range(len(batch)))
    expected, ratios = before.clone(), []
    for student, sibling in ((0, 1), (1, 0), (2, 1), (6, 5)):
        both = torch.cat([ids[spans[sibling]], ids[spans[student]]])
        alone = TokenBatch(torch.tensor([0, len(both)]), {"input_ids": both})
        theirs = plain_log_probs(lm, alone)[0][-len(ids[spans[student]]) :]
        mask = tokens["policy_mask"][spans[student]]
        ratio = (own[spans[student]] - theirs).detach()
        expected[spans[student]] -= 0.25 * torch.where(mask, ratio, 0.0)
        ratios.append(ratio[mask])
    torch.testing.assert_close(tokens["advantages"], expected, rtol=1e-4, atol=1e-5)
    assert metrics["rollout/sibling_share"] == pytest.approx(4 / 7)
    assert metrics["rollout/sibling_kl"] == pytest.approx(float(torch.cat(ratios).mean()), rel=1e-3)


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_the_expected_gradient_is_that_of_trl(loss: str) -> None:
    """Over all tokens that may be sampled, each loss has the gradient of TRL's GKD: reverse KL."""
    x = torch.arange(10, dtype=torch.float64).reshape(2, 5)
    student, teacher = x.sin().requires_grad_(), (1.7 * x).cos()
    log_probs, theirs = (y.log_softmax(-1).flatten() for y in (student, teacher))
    own, every = log_probs.detach(), torch.ones(10, dtype=torch.bool)
    advantages = -log_ratio(own, theirs, every)
    inputs = PolicyLossInputs(log_probs, own, advantages, torch.zeros(10, dtype=torch.int64))
    losses, _ = policy_loss(loss)(inputs)
    (own.exp() * losses).sum().backward()
    assert float(-(own.exp() * advantages).sum()) == pytest.approx(TRL_LOSS, abs=1e-9)
    expected = torch.tensor(TRL_GRADIENT, dtype=torch.float64)
    torch.testing.assert_close(student.grad, expected, rtol=0, atol=1e-9)


def test_a_reward_without_outcomes_is_refused() -> None:
    """No answer is known to be right, so that the term would never apply."""
    batch = make_groups([(3, [2, 2])])
    with pytest.raises(ConfigError, match="is_right"):
        SiblingTeacher(0.1, None).teach(trainer_of(batch, [[None, None]], "engine"))


def test_nothing_changes_without_a_right_sibling() -> None:
    """Groups in which nobody else is right keep their advantages, and no forward pass is made."""
    batch = make_groups([(3, [2, 2]), (3, [2, 2])])
    before = batch.tokens["advantages"].clone()
    trainer = trainer_of(batch, [[True, False], [False, False]], "engine")
    SiblingTeacher(0.1, 5).teach(trainer)
    assert torch.equal(batch.tokens["advantages"], before)
