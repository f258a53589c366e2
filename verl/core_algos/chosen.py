"""The algorithm that a run's options name: a built-in one, or the user's in a file.

`algorithm.adv_estimator=path/file.py:Name` is a function from `AdvantageInputs` to the advantage of
each token, or an `AdvantageEstimator`, which also says what it needs;
`actor.policy_loss=path/file.py:name` is a function from `PolicyLossInputs` to the loss of each
token, alone or with `PolicyDiagnostics`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from verl import plugins
from verl.core_algos.advantages import (
    ADVANTAGES,
    AdvantageEstimator,
    AdvantageInputs,
    Advantages,
    critic_free,
)
from verl.core_algos.policy_losses import (
    POLICY_LOSSES,
    PolicyDiagnostics,
    PolicyLoss,
    PolicyLossInputs,
    diagnose,
)
from verl.errors import ConfigError, PluginError, explain

ESTIMATOR = "algorithm.adv_estimator"
LOSS = "actor_rollout_ref.actor.policy_loss"


def advantage_estimator(name: str) -> AdvantageEstimator:
    """Return the estimator for a value of `algorithm.adv_estimator`. Raises ConfigError."""
    if name in ADVANTAGES:
        return ADVANTAGES[name]
    found: Any = plugins.resolve(ESTIMATOR, name, ADVANTAGES)
    if not isinstance(found, AdvantageEstimator):
        found = critic_free(name, _function(ESTIMATOR, name, found))
    estimator: AdvantageEstimator = found

    def checked(inputs: AdvantageInputs) -> Advantages:
        with plugins.user_code_errors(ESTIMATOR, name, "advantages", PluginError):
            result = estimator.compute(inputs)
            _check_shape(ESTIMATOR, name, result.advantages, inputs.token_rewards)
            off_policy = ~inputs.policy_mask.bool()
            return replace(result, advantages=result.advantages.masked_fill(off_policy, 0.0))

    return replace(estimator, name=name, compute=checked)


def policy_loss(name: str) -> PolicyLoss:
    """Return the loss for a value of `actor.policy_loss`. Raises ConfigError."""
    if name in POLICY_LOSSES:
        return POLICY_LOSSES[name]
    compute = _function(LOSS, name, plugins.resolve(LOSS, name, POLICY_LOSSES))

    def checked(inputs: PolicyLossInputs) -> tuple[Tensor, PolicyDiagnostics]:
        with plugins.user_code_errors(LOSS, name, "losses", PluginError):
            result = compute(inputs)
            losses, diagnostics = result if isinstance(result, tuple) else (result, None)
            _check_shape(LOSS, name, losses, inputs.log_probs)
            nothing = torch.zeros_like(losses, dtype=torch.bool)
            return losses, diagnostics or diagnose(inputs, clipped=nothing)

    return checked


def _function(option: str, name: str, found: Any) -> Callable[[Any], Any]:
    if isinstance(found, type) or not callable(found):
        got, expected = f"{name}, a {type(found).__name__}", "a function of the batch's tensors"
        raise ConfigError(explain(option, got, expected, "name one of the file"))
    function: Callable[[Any], Any] = found
    return function


def _check_shape(option: str, name: str, got: Any, like: Tensor) -> None:
    if not isinstance(got, Tensor) or got.shape != like.shape:
        shape = tuple(got.shape) if isinstance(got, Tensor) else f"a {type(got).__name__}"
        expected = f"a tensor with a value for each token, {tuple(like.shape)}"
        raise PluginError(explain(option, f"{shape} from {name}", expected, "correct it"))
