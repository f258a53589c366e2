"""Rewards in stages: when a stage ends, and what a checkpoint stores."""

import math
from collections.abc import Sequence

import pytest

from tests.verl.trainer.recording import prompts
from verl.config.reward import PlateauConfig, StageConfig
from verl.errors import ConfigError
from verl.rewards.interface import EachAlone, Reward, adapted
from verl.rewards.stages import StagedReward
from verl.types import Trajectory, start_trajectory

STARTED = [start_trajectory(prompt) for prompt in prompts(4)]


def staged(*options: StageConfig) -> StagedReward:
    """Return a staged reward whose stage n (from 1) gives score n."""

    def constant(number: int) -> EachAlone:
        return EachAlone(lambda trajectory: Reward(number))

    return StagedReward(options, [constant(n) for n in range(1, len(options) + 1)])


def play(reward: StagedReward, values: Sequence[float | None], first: int = 1) -> list[float]:
    """Return the score of each step, given the metric's values; None is a step without it."""
    scores = []
    for step, value in enumerate(values, first):
        scores.append(reward(STARTED)[0].score)
        metrics = {} if value is None else {"val/em": value}
        assert reward.observe(step, metrics) == {"reward/stage": scores[-1]}
    return scores


def test_a_stage_ends_after_its_step() -> None:
    """until_step is the last step of a stage; the last stage has no end."""
    options = StageConfig("a", until_step=2), StageConfig("b", until_step=3), StageConfig("c")
    assert play(staged(*options), [None] * 6) == [1, 1, 2, 3, 3, 3]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.1, 0.2, 0.2, 0.2, 0.9], [1, 1, 1, 1, 2]),
        ([0.1, 0.2, 0.3, 0.4, 0.5], [1, 1, 1, 1, 1]),
        ([0.5, None, 0.4, None, None, 0.3, 0.9], [1, 1, 1, 1, 1, 1, 2]),
        # Rises by less than min_delta do not count; the best value stays 0.1.
        ([0.10, 0.14, 0.15, 0.16], [1, 1, 1, 2]),
        ([math.nan, math.nan, 0.5], [1, 1, 2]),
    ],
)
def test_a_stage_ends_at_a_plateau(values: list[float | None], expected: list[float]) -> None:
    """Two values without a new best end the stage; steps without a value do not count."""
    plateau = PlateauConfig("val/em", patience=2, min_delta=0.05)
    assert play(staged(StageConfig("a", plateau=plateau), StageConfig("b")), values) == expected


def test_a_checkpoint_restores_the_state_of_a_plateau() -> None:
    """A run that is resumed after any step has the same stages as an uninterrupted one."""
    plateau = PlateauConfig("val/em", patience=2)
    options = StageConfig("a", plateau=plateau), StageConfig("b", until_step=6), StageConfig("c")
    values = [0.3, 0.4, 0.1, 0.2, 0.2, 0.3, 0.4]
    whole = play(staged(*options), values)
    assert whole == [1, 1, 1, 1, 2, 2, 3]
    for cut in range(len(values)):
        before, after = staged(*options), staged(*options)
        start = play(before, values[:cut])
        after.load_state_dict(before.state_dict())
        assert start + play(after, values[cut:], first=cut + 1) == whole


def test_state_of_another_reward_is_refused() -> None:
    """Stages of other names, and state for a reward without state."""
    saved = staged(StageConfig("a", until_step=1), StageConfig("b")).state_dict()
    with pytest.raises(ConfigError):
        staged(StageConfig("a", until_step=1), StageConfig("c")).load_state_dict(saved)
    with pytest.raises(ConfigError):
        EachAlone(lambda t: Reward(0.0)).load_state_dict(saved)


def test_a_run_resumed_without_state_finds_its_stage() -> None:
    """A checkpoint without stages starts with the first; stages whose step is past end at once."""
    options = StageConfig("a", until_step=2), StageConfig("b", until_step=4), StageConfig("c")
    reward = staged(*options)
    reward.load_state_dict({})
    assert play(reward, [None, None], first=9) == [1, 3]


def test_a_function_of_one_trajectory_becomes_a_manager() -> None:
    """A function is applied to each trajectory; a manager is returned as it is."""

    def by_source(trajectory: Trajectory) -> Reward:
        return Reward(float(trajectory.prompt.data_source == "nq"))

    manager = adapted(by_source)
    assert [r.score for r in manager(STARTED)] == [1, 0, 1, 0]
    assert adapted(manager) is manager
    assert manager.observe(1, {}) == {} and manager.state_dict() == {}


def test_stages_of_other_weights_are_other_stages() -> None:
    """The state of one weighted sum is refused by another sum and by a plain reward."""
    sums: list[dict[str, float]] = [{"em": 1.0, "f1": 0.5}, {"em": 1.0, "f1": 0.7}, {}]
    first, *others = [staged(StageConfig(until_step=1, weights=w), StageConfig("b")) for w in sums]
    for other in others:
        with pytest.raises(ConfigError, match=r"1 em \+ 0\.5 f1"):
            other.load_state_dict(first.state_dict())


@pytest.mark.parametrize(
    ("metric", "metrics", "is_logged"),
    [
        ("critic/scores/mean", {"critic/score/mean": 0.1}, True),
        ("val/emm", {"val/em": 0.1, "val/num_rows": 8.0}, True),
        ("val/em", {"critic/score/mean": 0.1}, False),
        ("critic/score/mean", {"critic/score/mean": 0.1}, False),
    ],
)
def test_a_metric_that_is_missing_is_logged_once(
    metric: str, metrics: dict[str, float], is_logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A mistyped name would never end the stage; validation metrics are missing in most steps."""
    reward = staged(StageConfig("a", plateau=PlateauConfig(metric)), StageConfig("b"))
    for step in (1, 2, 3):
        reward.observe(step, metrics)
    assert caplog.text.count(f"plateau of {metric},") == int(is_logged)
