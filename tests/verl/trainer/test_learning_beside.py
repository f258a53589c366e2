"""What a critic on devices of its own does while the actor works."""

import pytest
import torch

from tests.verl.trainer.test_learning import learner_of, small
from verl.monitor.performance import Timings


@pytest.mark.parametrize("is_apart", [False, True])
def test_a_critic_on_devices_of_its_own_works_while_the_actor_does(is_apart: bool) -> None:
    """It is begun before the actor and waited for after it; on shared ranks one follows another."""
    learner, ranks = learner_of()
    ranks.has_own_critic = is_apart  # type: ignore[misc]
    learner.config.actor_rollout_ref.actor.ppo_epochs = 2
    learner.config.critic.ppo_mini_batch_size = 2
    batch, timings = small([1.0, 0.0, 2.0, 0.0]), Timings()
    batch.tokens |= {"advantages": torch.ones(batch.num_tokens)}
    learner.compute_log_probs_and_values(batch, timings)
    found = learner.update(batch, 1, timings)
    assert found == {"size": 4.0, "value": 4.0} and float(batch.tokens["values"][0]) == -3.0
    begins, waits = "critic begins", "critic is waited for"
    looks, learns = ["log-probs"], ["actor", "actor"]
    if is_apart:
        expected = ["values begin", *looks, waits, begins, *learns, waits]
        assert set(timings.seconds) == {"old_log_prob", "update_actor", "wait_critic"}
    else:
        expected = [*looks, "values begin", waits, begins, waits, *learns]
        assert set(timings.seconds) == {"old_log_prob", "values", "update_critic", "update_actor"}
    assert set(timings.peaks) == ({"values", "update_critic"} if is_apart else set())
    assert ranks.log == expected
