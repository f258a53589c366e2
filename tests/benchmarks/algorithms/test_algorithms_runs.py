"""The variants of the algorithms' benchmark."""

from functools import cache

import pytest

from benchmarks.algorithms.variants import COMMON, NUM_TRAJECTORIES, VARIANTS
from verl.config import Config, cli


@cache
def compose(name: str) -> Config:
    """Return the configuration of a variant."""
    paths = ["actor_rollout_ref.model.path=m", "data.train_files=t", "data.val_files=v"]
    return cli.compose([*paths, *COMMON, *VARIANTS[name]])


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_accepted_and_has_the_same_budget(name: str):
    """All variants have the same number of trajectories, steps and updates."""
    config, reference = compose(name), compose("grpo")
    assert config.num_trajectories == NUM_TRAJECTORIES
    assert config.updates_per_step == reference.updates_per_step >= 2
    assert config.trainer.total_training_steps == reference.trainer.total_training_steps
    assert not config.needs_reference
