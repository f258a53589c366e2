"""Groups without a right answer give no advantage: by a plain loop, and only where they must."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.verl.trainer.test_learn import trajectory
from verl.batch import TokenBatch
from verl.config import Config
from verl.core_algos.advantages import ADVANTAGES, STD_EPSILON
from verl.core_algos.kl import FixedKLController
from verl.data.trajectories import read_step, write_step
from verl.errors import DataError
from verl.rewards.interface import Reward
from verl.trainer.collect import Samples, select_for_training
from verl.trainer.learn import add_advantages, assemble
from verl.trainer.metrics import ALL_WRONG, ALL_WRONG_UPDATE, advantage_metrics

Member = tuple[float, bool | None, int]
"""Score, outcome and policy tokens of a trajectory."""
members = st.tuples(
    st.sampled_from([0.0, 0.2, 0.5, 1.0]), st.sampled_from([None, False, True]), st.integers(1, 3)
)
some_groups = st.lists(st.lists(members, min_size=2, max_size=5), min_size=1, max_size=4)
GROUPED = [name for name, row in ADVANTAGES.items() if row.needs_groups]
ALONE = [n for n, row in ADVANTAGES.items() if not (row.needs_groups or row.needs_critic)]


def samples_of(groups: Sequence[Sequence[Member]]) -> Samples:
    rows = [(i, member) for i, group in enumerate(groups) for member in group]
    return Samples(
        [trajectory([(length, 0)], group=f"g{i}") for i, (_, _, length) in rows],
        [Reward(score, is_right=is_right) for _, (score, is_right, _) in rows],
    )


def config_of(name: str, *, gate: bool = True) -> Config:
    config = Config()
    config.algorithm.adv_estimator, config.algorithm.outcome_gate = name, gate
    config.algorithm.kl_ctrl.kl_coef = 0.0
    return config


def trained(samples: Samples, config: Config) -> TokenBatch:
    batch = assemble(samples, config)
    add_advantages(batch, config, FixedKLController(0.0))
    return batch


@given(some_groups)
def test_a_plain_loop_gives_the_same_advantages(groups: list[list[Member]]) -> None:
    """GRPO's formula on the groups with a right, or an unknown, outcome; 0 in the others."""
    expected: list[float] = []
    for group in groups:
        scores = [score for score, _, _ in group]
        mean = math.fsum(scores) / len(scores)
        deviation = math.sqrt(math.fsum((s - mean) ** 2 for s in scores) / (len(scores) - 1))
        for score, _, length in group:
            is_open = any(right is not False for _, right, _ in group)
            advantage = (score - mean) / (deviation + STD_EPSILON) if is_open else 0.0
            expected += [0.0, 0.0] + [advantage] * length  # a prompt of two tokens
    batch = trained(samples_of(groups), config_of("grpo"))
    assert batch.tokens["advantages"].tolist() == pytest.approx(expected, abs=1e-5)


@given(some_groups, st.sampled_from([*GROUPED, *ALONE]))
def test_right_and_unknown_outcomes_change_nothing(groups: list[list[Member]], name: str) -> None:
    """The gate changes no bit unless a group that is all wrong is compared."""
    is_open = [[(s, right is not False or None, n) for s, right, n in group] for group in groups]
    samples = samples_of(groups if name in ALONE else is_open)
    gated, ungated = (trained(samples, config_of(name, gate=gate)) for gate in (True, False))
    assert gated.tokens["advantages"].equal(ungated.tokens["advantages"])


@given(some_groups, st.sampled_from(GROUPED))
def test_an_exact_match_alone_changes_nothing(groups: list[list[Member]], name: str) -> None:
    """With the plain outcome as the score a group that is all wrong has equal scores anyway."""
    exact = [[(float(bool(right)), bool(right), n) for _, right, n in group] for group in groups]
    samples = samples_of(exact)
    gated, ungated = (trained(samples, config_of(name, gate=gate)) for gate in (True, False))
    assert gated.tokens["advantages"].equal(ungated.tokens["advantages"])


def test_the_share_of_the_update_is_logged() -> None:
    """Σ |advantage| of groups without a right answer by all, at the tokens of the loss."""
    wrong = [(0.0, False, 1), (0.5, False, 3)]
    samples = samples_of([wrong, [(0.0, False, 2), (1.0, True, 2)]])
    metrics = advantage_metrics(trained(samples, config_of("dr_grpo", gate=False)))
    assert metrics[ALL_WRONG] == 0.5
    assert metrics[ALL_WRONG_UPDATE] == pytest.approx(0.25 * 4 / (0.25 * 4 + 0.5 * 4))
    assert advantage_metrics(trained(samples, config_of("dr_grpo")))[ALL_WRONG_UPDATE] == 0.0
    unknown = samples_of([[(0.0, None, 1), (1.0, None, 1)]])
    assert ALL_WRONG not in advantage_metrics(trained(unknown, config_of("grpo")))


def test_the_original_has_no_gate() -> None:
    config = config_of("grpo")
    config.compat = "search_r1"
    batch = trained(samples_of([[(0.0, False, 1), (0.5, False, 1)]]), config)
    assert batch.tokens["advantages"].any()


def test_dynamic_sampling_replaces_what_the_gate_closes() -> None:
    """A group that differs only in what shapes its scores is not one of the step's groups."""
    config = config_of("grpo")
    config.algorithm.filter_groups.enable, config.data.train_batch_size = True, 2
    shaped = [(0.0, False, 1), (0.5, False, 1)]
    samples = samples_of([shaped, [(0.0, False, 1), (1.0, True, 1)]])
    assert select_for_training(samples, config, 1, 1)[0].groups() == ["g1"]
    config.algorithm.outcome_gate = False
    assert select_for_training(samples, config, 1, 1)[0].groups() == ["g0", "g1"]


def test_a_record_keeps_the_outcome(tmp_path: Path) -> None:
    """A run on recorded trajectories has the gate of the recorded run, without scoring again."""
    samples = samples_of([[(0.0, False, 1), (0.5, None, 1), (1.0, True, 1)]])
    write_step(tmp_path, 1, samples.trajectories, samples.rewards)
    assert [row.reward for row in read_step(tmp_path, 1)] == samples.rewards


@pytest.mark.parametrize("false", [np.False_, torch.tensor(False), 0])
def test_an_outcome_of_a_manager_is_a_bool(false: Any, tmp_path: Path) -> None:
    """The outcomes of other libraries close the gate and can be recorded."""
    samples = samples_of([[(0.0, false, 1), (0.5, false, 1)]])
    assert samples.all_wrong_groups() == {"g0"}
    write_step(tmp_path, 1, samples.trajectories, samples.rewards)


def test_a_record_with_another_outcome_is_refused(tmp_path: Path) -> None:
    samples = samples_of([[(0.0, False, 1)]])
    write_step(tmp_path, 1, samples.trajectories, samples.rewards)
    (file,) = tmp_path.glob("*.jsonl")
    file.write_text(file.read_text().replace('"is_right":false', '"is_right":"false"'))
    with pytest.raises(DataError, match="is_right"):
        read_step(tmp_path, 1)


@pytest.mark.parametrize("name", GROUPED)
def test_closed_groups_have_no_advantage_whatever_whitening_does(name: str) -> None:
    """Right dialogues are short, so that the mean over tokens is not that over groups."""
    mixed: list[Member] = [(1.0, True, 1), (0.0, False, 9), (0.0, False, 9)]
    wrong: list[Member] = [(0.0, False, 5)] * 3
    batch = trained(samples_of([mixed, wrong, mixed, wrong]), config_of(name))
    found = [bool(x.any()) for x in batch.sequences("advantages")]
    assert not any(found[3:6]) and not any(found[9:]) and any(found[:3])
    assert advantage_metrics(batch)[ALL_WRONG_UPDATE] == 0.0
