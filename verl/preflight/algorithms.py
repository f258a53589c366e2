"""A trial of the user's own advantage estimator and policy loss, on a batch of four tokens each."""

from collections.abc import Iterator

import torch

from verl.config import Config
from verl.core_algos.advantages import ADVANTAGES, AdvantageInputs
from verl.core_algos.chosen import ESTIMATOR, LOSS, advantage_estimator, policy_loss
from verl.core_algos.policy_losses import POLICY_LOSSES, PolicyLossInputs
from verl.errors import ConfigError, UserError, explain


def problems(config: Config) -> Iterator[UserError]:
    """Yield why the user's own estimator or loss cannot be computed."""
    loss = config.actor_rollout_ref.actor.policy_loss
    trials = ((config.algorithm.adv_estimator, ADVANTAGES, _try_estimator),
              (loss, POLICY_LOSSES, _try_loss))  # fmt: skip
    for name, builtin, trial in trials:
        if name not in builtin:
            try:
                trial(name)
            except UserError as error:
                yield error


def _try_estimator(name: str) -> None:
    rewards = torch.zeros(4).index_fill(0, torch.tensor([1]), 1.0)
    mask, offsets = torch.tensor([True, True, False, True]), torch.tensor([0, 2, 4])
    groups = torch.tensor([0, 0])
    inputs = AdvantageInputs(rewards, mask, offsets, torch.zeros(4), groups)
    _check_finite(ESTIMATOR, name, advantage_estimator(name).compute(inputs).advantages)


def _try_loss(name: str) -> None:
    log_probs = torch.full((4,), -1.0, requires_grad=True)
    advantages, sequence_ids = torch.tensor([1.0, 1.0, -1.0, -1.0]), torch.tensor([0, 0, 1, 1])
    inputs = PolicyLossInputs(log_probs, log_probs.detach() - 0.1, advantages, sequence_ids)
    losses, _ = policy_loss(name)(inputs)
    _check_finite(LOSS, name, losses)
    if not losses.requires_grad:
        expected = "losses with a gradient in log_probs"
        raise ConfigError(explain(LOSS, name, expected, "compute them from inputs.log_probs"))


def _check_finite(option: str, name: str, values: torch.Tensor) -> None:
    if not values.isfinite().all():
        expected = "finite values, on rewards of 0 and 1"
        raise ConfigError(explain(option, f"{values.tolist()} from {name}", expected, "correct it"))
