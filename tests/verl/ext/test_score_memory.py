"""Rows drawn by their past scores: pools, rests, batches ahead of time, and resumed runs."""

import json
from collections import Counter, deque

import numpy as np
import pytest

from tests.verl.config.test_cli import REQUIRED
from tests.verl.trainer.recording import prompts
from verl.config import Config, cli
from verl.config.checks import problems
from verl.errors import ConfigError
from verl.ext.score_memory import ScoreSampler
from verl.rewards.interface import Reward
from verl.trainer.collect import Samples
from verl.types import start_trajectory

NUM_ROWS, SIZE = 24, 6
PROMPTS = prompts(NUM_ROWS)


def sampler(seed: int = 0, size: int = SIZE) -> ScoreSampler:
    config = Config()
    config.algorithm.adv_estimator, config.trainer.seed = "grpo", seed
    config.data.train_batch_size = size
    return ScoreSampler(config, PROMPTS)


def scored(step: int, rows: list[int], scores: dict[int, list[float]]) -> Samples:
    """Return the groups of a batch, with the scores of each row; by default, all are wrong."""
    found = Samples()
    for row in rows:
        for i, score in enumerate(scores.get(row, [0.0, 0.0])):
            start = start_trajectory(PROMPTS[row], group=f"{step}/{row}", sample=i)
            found.extend(Samples([start], [Reward(score, is_right=score == 1)]))
    return found


def see(chosen: ScoreSampler, samples: Samples) -> dict[str, float]:
    return dict(chosen.observe(samples.trajectories, samples.rewards))


def test_live_rows_fill_half_of_a_batch_and_dead_ones_sit_out() -> None:
    """Over many batches, live rows are drawn far more often, and dead ones ever more seldom."""
    chosen, live = sampler(), {3: [0.0, 1.0], 7: [1.0, 0.0], 11: [0.0, 1.0]}
    scores = live | {5: [0.2, 0.4]}  # a spread by shaping only, which the gate takes away
    drawn = Counter[int]()
    for step in range(60):
        rows = chosen.next_batch()
        assert len(set(rows)) == SIZE
        drawn.update(rows)
        metrics = see(chosen, scored(step, rows, scores))
    assert metrics == {"rollout/rows_live": 3 / 24, "rollout/rows_dead": 21 / 24}
    others = [drawn[row] for row in range(NUM_ROWS) if row not in live]
    assert 1 <= min(others) <= max(others) < min(drawn[row] for row in live) / 2


def test_rests_are_of_1_3_and_7_epochs() -> None:
    """A row of equal scores comes in these epochs, where the others come in all."""
    chosen, epochs = sampler(size=1), []
    other = {row: [0.0, 1.0] for row in range(1, NUM_ROWS)}
    for step in range(NUM_ROWS * 23):
        (row,) = chosen.next_batch()
        if row == 0:
            epochs.append(chosen.state_dict()["epoch"])
        see(chosen, scored(step, [row], other))
    assert epochs == [0, 2, 6, 14, 22]


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_resumed_sampler_goes_on_as_the_whole_one(ahead: int) -> None:
    """Also with batches that were drawn ahead of time, of which no row is drawn twice."""
    draw = np.random.default_rng(1)
    scores = {row: [0.0, float(draw.random() < 0.5)] for row in range(NUM_ROWS)}

    def run(chosen: ScoreSampler, waiting: deque[list[int]], steps: range) -> list[list[int]]:
        used = []
        for step in steps:
            while len(waiting) <= ahead:
                waiting.append(chosen.next_batch())
            assert len({row for rows in waiting for row in rows}) == SIZE * len(waiting)
            used.append(waiting.popleft())
            see(chosen, scored(step, used[-1], scores))
        return used

    whole = run(sampler(), deque(), range(40))
    first, waiting = sampler(), deque[list[int]]()
    begin = run(first, waiting, range(17))
    second = sampler()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert begin + run(second, waiting, range(17, 40)) == whole


def test_rows_of_lost_groups_come_back() -> None:
    """A row whose group failed waits only until a later batch is scored."""
    chosen = sampler(size=12)
    lost, later = chosen.next_batch(), chosen.next_batch()
    see(chosen, scored(0, later, {}))
    assert set(lost) == set(chosen.next_batch())


def test_rows_of_a_batch_that_is_sampled_in_parts_wait() -> None:
    """Dynamic sampling keeps rows that it does not need for the next step."""
    live = {row: [0.0, 1.0] for row in range(NUM_ROWS)}
    for seed in range(5):
        chosen = sampler(seed, size=8)
        see(chosen, scored(0, list(range(NUM_ROWS)), live))
        first = chosen.next_batch()
        see(chosen, scored(1, first[:5], live))
        assert not set(first[5:]) & set(chosen.next_batch())


def test_rows_that_wait_are_drawn_if_there_are_no_others() -> None:
    """More batches ahead than there are rows: nothing blocks, and each batch is whole."""
    chosen = sampler()
    assert [len(set(chosen.next_batch())) for _ in range(9)] == [SIZE] * 9


def test_states_of_shuffled_epochs_and_other_rows() -> None:
    """The memory begins empty where a run was shuffled before; other rows are refused."""
    chosen = sampler()
    state = {"epoch": 1, "position": 3, "num_rows": NUM_ROWS, "batch_size": SIZE}
    chosen.load_state_dict(state)
    assert len(set(chosen.next_batch())) == SIZE
    with pytest.raises(ConfigError, match="num_rows"):
        chosen.load_state_dict(state | {"num_rows": 3})
    with pytest.raises(ConfigError, match=r"data\.train_batch_size"):
        sampler(size=25)


@pytest.mark.parametrize(
    ("more", "key"),
    [("actor_rollout_ref.rollout.n_agent=1", "n_agent"), ("data.weight_column=w", "data.shuffle")],
)
def test_an_order_without_groups_or_beside_another_is_refused(more: str, key: str) -> None:
    """Before the run; the options are otherwise accepted."""
    group = "actor_rollout_ref.rollout.n_agent=2"
    words = [*REQUIRED, group, "data.shuffle_train_dataloader=by_score"]
    assert list(problems(cli.compose(words))) == []
    with pytest.raises(ConfigError, match=key):
        cli.compose([*words, more])
