"""A critic on its own devices computes concurrently with the actor."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.verl.trainer.test_learn import learner_of, small
from verl.ext.critic_apart import hook
from verl.monitor.performance import Timings


@pytest.mark.parametrize("is_separate", [False, True])
def test_a_separate_critic_computes_while_the_actor_does(is_separate: bool) -> None:
    """It is started before the actor and waited for after it; shared ranks run them in turn."""
    learner, ranks = learner_of()
    if is_separate:
        ranks.groups["critic"] = "critic ranks"
    trainer: Any = SimpleNamespace(learner=learner, ranks=ranks)
    if (found := hook(trainer)) is not None:
        found.on_start(trainer)
    learner.config.actor_rollout_ref.actor.ppo_epochs = 2
    learner.config.critic.ppo_mini_batch_size = 2
    batch, timings = small([1.0, 0.0, 2.0, 0.0]), Timings()
    batch.tokens |= {"advantages": torch.ones(batch.num_tokens)}
    learner.prepare(batch, timings)
    metrics = learner.update(batch, 1, timings)
    assert metrics == {"size": 4.0, "value": 4.0} and float(batch.tokens["values"][0]) == -3.0
    compute, train, wait = "begin critic", "begin updates of critic", "wait for critic"
    passes = [f"{what} {role}" for role in ("actor", "reference") for what in ("begin", "wait for")]
    updates = ["actor", "actor"]
    if is_separate:
        expected = [compute, *passes, wait, train, *updates, wait]
        assert set(timings.seconds) == {"old_log_prob", "update_actor", "wait_critic"}
    else:
        expected = [compute, wait, *passes, train, wait, *updates]
        assert set(timings.seconds) == {"old_log_prob", "values", "update_critic", "update_actor"}
    assert set(timings.peaks) == ({"values", "update_critic"} if is_separate else set())
    assert ranks.log == expected
