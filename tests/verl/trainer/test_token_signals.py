"""The trainer's per-token columns that are written to the record."""

import math

import pytest
import torch

from tests.verl.trainer.test_learn import prepared, samples_of
from verl.config import Config
from verl.ext.record import token_signals


@pytest.mark.parametrize("level", ["none", "token", "sequence"])
@pytest.mark.parametrize("masking", [True, False])
def test_signals_are_the_columns_at_the_trained_tokens(level: str, masking: bool) -> None:
    """Signals are those of a plain loop; other tokens are NaN.

    `rollout_weights` exist only with a correction. Without masking, observations are trained on,
    which no engine sampled.
    """
    config = Config()
    actor = config.actor_rollout_ref.actor
    actor.rollout_correction = {"rollout_is": level, "rollout_is_threshold": 1.5}
    actor.state_masking = masking
    batch = prepared(config, samples_of([[(3, 2), (1, 0)], [(2, 0)], [(2, 1), (2, 0)]], [0, 1, 1]))
    batch.tokens["rollout_log_probs"] = torch.linspace(-1.0, 1.0, batch.num_tokens)
    starts = batch.offsets.tolist()
    for number, signals in enumerate(token_signals(batch, config)):
        own = range(starts[number], starts[number + 1])
        ratios = {}
        for t in own:
            old = float(batch.tokens["old_log_probs"][t])
            rollout = float(batch.tokens["rollout_log_probs"][t])
            ratios[t] = old - rollout if batch.tokens["policy_mask"][t] else 0.0
            is_trained = bool(batch.tokens["loss_mask"][t])
            for name in ("old_log_probs", "ref_log_probs", "values"):
                value = float(signals[name][t - own[0]])
                assert value == float(batch.tokens[name][t]) if is_trained else math.isnan(value)
        assert ("rollout_weights" in signals) == (level != "none")
        whole = sum(ratios[t] for t in own if batch.tokens["loss_mask"][t])
        for t in own if level != "none" else ():
            weight = float(signals["rollout_weights"][t - own[0]])
            if batch.tokens["loss_mask"][t]:
                ratio = math.exp(ratios[t] if level == "token" else whole)
                assert weight == pytest.approx(min(ratio, 1.5), rel=1e-5)
            else:
                assert math.isnan(weight)


def test_the_engines_log_probs_are_not_the_trainers() -> None:
    """If they are used as the old log-probs, they are recorded only once."""
    config = Config()
    config.actor_rollout_ref.actor.old_log_probs = "engine"
    batch = prepared(config, samples_of([[(3, 0)]], [1.0]))
    assert set(token_signals(batch, config)[0]) == {"values", "ref_log_probs"}
