"""Trajectories and the jagged batch: alignment, masks by origin, selection, pickling."""

import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.batch import TokenBatch
from verl.types import (
    Completion,
    Origin,
    Prompt,
    Sampling,
    Segment,
    Status,
    Trajectory,
    start_trajectory,
)


def prompt(ids: tuple[int, ...] = (1, 2)) -> Prompt:
    return Prompt("file#0", ids, "geo", ("gold",))


def dialogue(*policy: tuple[int, ...], group: str = "g") -> Trajectory:
    """Return a trajectory in which the observation (7, 7) follows each policy segment."""
    trajectory = start_trajectory(prompt(), group=group)
    for ids in policy:
        trajectory.segments.append(Segment(Origin.POLICY, ids, log_probs=(-0.5,) * len(ids)))
        trajectory.segments.append(Segment(Origin.OBSERVATION, (7, 7)))
    return trajectory


def test_masks_come_from_the_origin_not_from_ids() -> None:
    """A sampled pad id (0) is a policy token, also in the middle of a response."""
    batch = TokenBatch.from_trajectories([dialogue((5, 0, 5), (0,))])
    assert batch.tokens["input_ids"].tolist() == [1, 2, 5, 0, 5, 7, 7, 0, 7, 7]
    assert batch.tokens["policy_mask"].tolist() == [0, 0, 1, 1, 1, 0, 0, 1, 0, 0]
    assert batch.tokens["response_mask"].tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 1, 1]


def test_offsets_delimit_the_trajectories() -> None:
    """Each sequence has its trajectory's tokens, group and data source."""
    trajectories = [dialogue((5, 6), group="a"), dialogue((5,), (6, 7, 8), group="b")]
    batch = TokenBatch.from_trajectories(trajectories)
    assert batch.offsets.tolist() == [0, 6, 16]
    assert batch.columns == {"group": ["a", "b"], "data_source": ["geo", "geo"]}
    assert [s.tolist() for s in batch.sequences("input_ids")] == [t.ids for t in trajectories]


def test_columns_of_the_wrong_length_are_rejected() -> None:
    """Token columns, rows and object columns must all match the offsets; nothing is broadcast."""
    offsets = torch.tensor([0, 2, 3])
    TokenBatch(offsets, {"x": torch.zeros(3)}, {"x": torch.zeros(2)}, {"x": [1, 2]})
    for columns in (
        ({"x": torch.zeros(2)}, {}, {}), ({}, {"x": torch.zeros(3)}, {}), ({}, {}, {"x": [1]})
    ):  # fmt: skip
        with pytest.raises(AssertionError, match="x: "):
            TokenBatch(offsets, *columns)


def test_tokens_are_counted_by_origin() -> None:
    """2 prompt, 4 policy and 4 observation tokens; `text` has all segments but the prompt."""
    trajectory = dialogue((5, 6, 7), (8,))
    trajectory.segments[1:3] = [
        Segment(Origin.POLICY, (5, 6, 7), "said ", (-0.5,) * 3),
        Segment(Origin.OBSERVATION, (7, 7), "seen"),
    ]
    assert [trajectory.num_tokens_of(origin) for origin in Origin] == [2, 4, 4]
    assert (trajectory.num_tokens, trajectory.num_policy_tokens) == (10, 4)
    assert trajectory.text == "said seen"


def test_defaults() -> None:
    """Full-distribution sampling, status OUT_OF_TURNS, weight version 0, empty statistics."""
    sampling, started = Sampling(max_tokens=1), start_trajectory(prompt())
    assert (sampling.temperature, sampling.top_p, sampling.stop, sampling.seed) == (1, 1, (), None)
    assert (started.status, started.sample, started.seed) == (Status.OUT_OF_TURNS, 0, None)
    assert started.failure is None and started.faults == started.stats == {}
    assert Completion((), (), "", "stop").weight_version == 0
    assert Segment(Origin.PROMPT, ()).weight_version == 0


def test_rollout_log_probs_are_aligned_with_their_tokens() -> None:
    """Policy tokens have their log-prob, all other tokens 0."""
    batch = TokenBatch.from_trajectories([dialogue((5, 6))])
    assert batch.tokens["rollout_log_probs"].tolist() == [0, 0, -0.5, -0.5, 0, 0]


def test_a_policy_segment_without_log_probs_is_rejected() -> None:
    """Every policy token needs the log-prob with which an engine sampled it."""
    with pytest.raises(AssertionError, match="log-probs"):
        Segment(Origin.POLICY, (1, 2))


def test_pickling_keeps_trajectories_bit_for_bit() -> None:
    """Columns are unpacked on first access only, and can be pickled again before and after it."""
    policy = Segment(Origin.POLICY, (5, 0, 150_000), "said", (-0.1, math.nan, -math.inf), 2)
    sent = start_trajectory(prompt(), group="g")
    sent.segments += [policy, Segment(Origin.OBSERVATION, (7, 7))]
    first = pickle.loads(pickle.dumps([sent]))
    (received,) = second = pickle.loads(pickle.dumps(first))
    assert received.num_tokens == 7 and received.num_policy_tokens == 3
    batches = [TokenBatch.from_trajectories(some) for some in ([sent], first, second)]
    assert all("ids" not in vars(segment) for segment in received.segments), "nothing was unpacked"
    for batch in batches[1:]:
        assert torch.equal(batch.offsets, batches[0].offsets)
        for name, column in batches[0].tokens.items():
            assert column.dtype is batch.tokens[name].dtype
            torch.testing.assert_close(batch.tokens[name], column, rtol=0, atol=0, equal_nan=True)
    assert repr(received) == repr(sent) == repr(pickle.loads(pickle.dumps(received)))
    assert received.segments[::2] == sent.segments[::2] and hash(received.segments[0])


def test_pickling_keeps_a_batch() -> None:
    """Columns keep their dtype, and the received tensors are writable."""
    batch = numbered([3, 0, 2])
    batch.tokens["mask"] = batch.tokens["input_ids"] > 1
    received = pickle.loads(pickle.dumps(batch))
    assert torch.equal(received.offsets, batch.offsets) and received.columns == batch.columns
    for kind in ("tokens", "rows"):
        for name, column in getattr(batch, kind).items():
            assert getattr(received, kind)[name].dtype is column.dtype
            assert torch.equal(getattr(received, kind)[name], column)
    received.tokens["input_ids"] += 1


lengths_strategy = st.lists(st.integers(1, 30), min_size=1, max_size=12)


def numbered(lengths: list[int]) -> TokenBatch:
    """Return a batch with token ids 100 * sequence + position."""
    ids = [100 * seq + pos for seq, length in enumerate(lengths) for pos in range(length)]
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    return TokenBatch(
        torch.tensor(offsets),
        {"input_ids": torch.tensor(ids)},
        {"scores": torch.arange(len(lengths)).float()},
        {"group": [str(i) for i in range(len(lengths))]},
    )


@given(lengths_strategy, st.randoms(use_true_random=False))
def test_select_keeps_each_sequence_whole(lengths: list[int], random) -> None:
    """Under any reordering, a sequence keeps its tokens, rows and columns."""
    order = random.sample(range(len(lengths)), len(lengths))
    chosen = numbered(lengths).select(order)
    expected = [[100 * i + p for p in range(lengths[i])] for i in order]
    assert [s.tolist() for s in chosen.sequences("input_ids")] == expected
    assert chosen.rows["scores"].tolist() == [float(i) for i in order]
    assert chosen.columns["group"] == [str(i) for i in order]
