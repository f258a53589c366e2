"""Alignment and loss of the value function, compared with manual computations."""

from collections.abc import Callable

import pytest
import torch

from example.tiny import HIDDEN_SIZE, tiny_llama
from tests.core.batches import make_batch, make_groups, make_tree
from tests.verl.training.operations import OperationRecorder
from tests.verl.training.ranks import VOCAB
from verl.batch import TokenBatch
from verl.config import CriticConfig, OptimConfig
from verl.core_algos.losses import loss_weights
from verl.packing import PREFIXES, common_prefixes
from verl.training.actor import TokenBudgets
from verl.training.attention import PACKED
from verl.training.critic import Critic
from verl.training.fsdp import FsdpModel, FsdpOptions
from verl.training.models import ValueModel, blocks

pytestmark = pytest.mark.usefixtures("single_rank")
LENGTHS = [12, 9, 17]


def make_critic(budget: int = 1000, head_scale: float = 0.1) -> Critic:
    lm = tiny_llama(VOCAB)
    lm.set_attn_implementation(PACKED)
    module = ValueModel(lm)
    with torch.no_grad():
        module.value_head.weight += head_scale * torch.arange(HIDDEN_SIZE).remainder(7).sub(3)
    config = CriticConfig(optim=OptimConfig(lr=1e-4))
    options = FsdpOptions(torch.float32, 10, config.optim)
    model = FsdpModel(module, blocks(module, lm), torch.device("cpu"), options, [module.value_head])
    return Critic(model, config, TokenBudgets(budget, budget))


def test_value_of_a_token_comes_from_the_state_before_it() -> None:
    """values[t] is the head of the hidden state at t - 1, and 0 off the policy."""
    batch = make_batch(LENGTHS)
    head = 0.1 * torch.arange(HIDDEN_SIZE).remainder(7).sub(3).float()
    parts = []
    for ids in batch.sequences("input_ids"):
        hidden = tiny_llama(VOCAB).model(ids[None]).last_hidden_state[0]
        parts += [torch.zeros(1), (hidden @ head)[:-1]]
    expected = torch.where(batch.tokens["policy_mask"], torch.cat(parts), 0.0).detach()
    for budget in (1000, 20):
        actual = make_critic(budget).values(batch)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_a_new_critic_predicts_zero() -> None:
    """The head starts at zero, so the first advantages are not noise."""
    assert make_critic(head_scale=0.0).values(make_batch(LENGTHS)).abs().max() == 0


def test_value_loss_is_the_clipped_one_and_falls() -> None:
    """The loss is half the clipped squared error over policy tokens, and updates reduce it."""
    batch = make_batch(LENGTHS)
    critic, mask = make_critic(20), batch.tokens["policy_mask"]
    now, old, returns = critic.values(batch), batch.tokens["values"], batch.tokens["returns"]
    near = torch.minimum(torch.maximum(now, old - 0.5), old + 0.5)
    worst = torch.maximum((now - returns) ** 2, (near - returns) ** 2)
    losses = [critic.update(batch)["critic/vf_loss"] for _ in range(3)]
    assert losses[0] == pytest.approx(float(0.5 * worst[mask].mean()), rel=1e-4)
    assert losses[2] < losses[0]


@pytest.mark.parametrize("make", [lambda: make_groups([(7, [5, 1, 12]), (9, [3, 8])]), make_tree])
def test_values_and_updates_with_shared_prompts_are_the_same(
    make: Callable[[], TokenBatch],
) -> None:
    """Values of responses do not change if what they have in common is computed once."""
    plain, shared = make(), make()
    shared.columns[PREFIXES] = common_prefixes(shared)
    apart, together = make_critic(), make_critic()
    torch.testing.assert_close(together.values(shared), apart.values(plain), rtol=1e-4, atol=1e-5)
    expected, actual = apart.update(plain), together.update(shared)
    share, whole = (m.pop("critic/computed_token_share") for m in (actual, expected))
    assert share < whole == 1.0
    assert actual == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_a_value_mask_lets_the_critic_learn_from_observations() -> None:
    """With `value_mask`, values and loss cover its tokens; the policy's mask is not read."""
    batch = make_batch(LENGTHS)
    critic, policy = make_critic(20), batch.tokens["policy_mask"]
    narrow = critic.values(batch)
    response = torch.ones(sum(LENGTHS), dtype=torch.bool)
    for start in batch.offsets[:-1].tolist():
        response[start : start + 2] = False
    weights = loss_weights(response, batch.offsets, "token-mean")
    batch.tokens |= {"value_mask": response, "value_weights": weights}
    wide = critic.values(batch)
    torch.testing.assert_close(wide[policy], narrow[policy])
    assert wide[response & ~policy].ne(0).all() and not wide[~response].any()
    old, returns = batch.tokens["values"], batch.tokens["returns"]
    near = torch.minimum(torch.maximum(wide, old - 0.5), old + 0.5)
    worst = torch.maximum((wide - returns) ** 2, (near - returns) ** 2)
    actual = critic.update(batch)["critic/vf_loss"]
    assert actual == pytest.approx(float(0.5 * worst[response].mean()), rel=1e-4)


def test_means_are_means_whatever_the_aggregation() -> None:
    """Weights that do not sum to 1 scale only the loss, not the other metrics."""
    batch = make_batch(LENGTHS)
    mask = batch.tokens["policy_mask"]
    batch.tokens["loss_weights"] = loss_weights(mask, batch.offsets, "seq-mean-token-sum")
    critic = make_critic(20)
    values, returns = critic.values(batch)[mask], batch.tokens["returns"][mask]
    is_clipped = (values - batch.tokens["values"][mask]).abs() > 0.5
    actual = critic.update(batch)
    assert actual["critic/value_mean"] == pytest.approx(float(values.mean()), rel=1e-4)
    assert actual["critic/return_mean"] == pytest.approx(float(returns.mean()), rel=1e-4)
    assert actual["critic/value_clip_fraction"] == pytest.approx(float(is_clipped.float().mean()))


def test_line_17_a_return_that_is_not_finite_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    """The critic counts the update, names the groups, and predicts the same values as before."""
    batch, critic = make_batch(LENGTHS), make_critic()
    before = critic.values(batch)
    batch.tokens["returns"][batch.tokens["policy_mask"].nonzero()[0, 0]] = torch.inf
    assert critic.update(batch)["critic/skipped_updates"] == 1
    assert "g0" in caplog.text
    assert torch.equal(critic.values(batch), before)


def test_an_update_is_deterministic_on_gpus() -> None:
    """torch's deterministic mode raises for no operation, forward or backward."""
    critic, recorder = make_critic(20), OperationRecorder()
    with recorder:
        critic.update(make_batch(LENGTHS))
    assert "embedding_dense_backward" in recorder.names and not recorder.refused


def test_nondeterministic_operations_are_recorded() -> None:
    """The recorder of these tests finds a cumulative sum of floats, but not of integers."""
    with OperationRecorder() as integers:
        torch.arange(3).cumsum(0)
    with OperationRecorder() as floats:
        torch.ones(3).cumsum(0)
    assert (integers.refused, floats.refused) == (set(), {"cumsum"})
