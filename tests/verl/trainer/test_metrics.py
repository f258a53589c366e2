"""The shares that the collapse guard watches, counted by hand."""

from verl.protocol import Prompt, Status, Trajectory
from verl.trainer.guard.collapse import LENGTH_CLIP, MALFORMED, NO_ANSWER, SEARCH
from verl.trainer.metrics import conduct_metrics, rollout_metrics

PROMPT = Prompt("q", (1,), "nq", ("a",))


def played(status: Status, *counts: float) -> Trajectory:
    """A trajectory whose agent reports `counts`: turns, valid searches, malformed, truncated."""
    names = ("turns", "valid_searches", "malformed_turns", "truncated_turns")
    return Trajectory(PROMPT, [], status, dict(zip(names, counts, strict=False)))


def test_conduct_is_counted_over_turns_and_trajectories() -> None:
    """Tags and length by turn; searches and answers by trajectory; failed ones do not count."""
    found = [
        played(Status.ANSWERED, 3, 2, 0, 0),
        played(Status.OUT_OF_TURNS, 4, 0, 3, 2),
        played(Status.OUT_OF_BUDGET, 1, 1, 1, 0),
        played(Status.FAILED, 9, 9, 9, 9),
    ]
    expected = {NO_ANSWER: 2 / 3, SEARCH: 2 / 3, MALFORMED: 4 / 8, LENGTH_CLIP: 2 / 8}
    assert conduct_metrics(found) == expected
    assert rollout_metrics(found).items() >= expected.items()


def test_an_agent_without_such_counts_has_fewer_metrics() -> None:
    """The trainer knows no tags: what an agent does not count is not guessed."""
    assert conduct_metrics([played(Status.ANSWERED), played(Status.OUT_OF_TURNS)]) == {
        NO_ANSWER: 0.5
    }


def test_a_batch_of_failures_has_no_conduct() -> None:
    """Infrastructure alone never looks like a collapse."""
    assert conduct_metrics([played(Status.FAILED, 1)]) == {}
