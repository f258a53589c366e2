"""How `TrainerRanks` combines the results of all ranks: checkpoints, memory, cards."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.core.batches import make_batch
from verl.errors import SaveError
from verl.single_controller.actors import ActorLocation
from verl.trainer.ranks import FORWARD, TrainerRanks
from verl.training.devices import PeakMemory


class FakeGroup:
    """A group whose ranks return fixed results, whatever is called; records the calls."""

    def __init__(self, results: Sequence[Any], name: str = "rank") -> None:
        self.results, self.name = results, name
        self.called: list[str] = []
        self.sent = set[str]()
        """Token columns of the last shard that was sent."""
        self.ids: list[list[int]] = []
        """Token ids that each rank received last."""

    def __len__(self) -> int:
        return len(self.results)

    def begin(self, method: str, *arguments: Any) -> Callable[[], list[Any]]:
        self.called.append(method)
        return lambda: list(self.results)

    def begin_scatter(self, method: str, shards: Sequence[Any]) -> Callable[[], list[Any]]:
        batches = [shard if isinstance(shard, tuple) else (shard,) for shard in shards]
        self.sent = set(batches[0][0].tokens)
        self.ids = [[i for x in own for i in x.tokens["input_ids"].tolist()] for own in batches]
        return self.begin(method)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        return list(self.results)

    def scatter(self, method: str, shards: Sequence[Any], *arguments: Any) -> list[Any]:
        return list(self.results)

    def locations(self) -> list[ActorLocation]:
        return [ActorLocation("node", "host", ()) for _ in self.results]


def ranks_of(group: Any, critic: Any = None, ranks_per_shard: int = 1) -> TrainerRanks:
    """Return the ranks of fake groups; `ranks_per_shard` is that of the actor."""
    groups = {"actor": group, "reference": group, "critic": group if critic is None else critic}
    return TrainerRanks(groups, {"actor": ranks_per_shard})


@pytest.mark.parametrize(("second_host", "fits"), [(79, True), (81, False)])
def test_a_copy_must_fit_on_every_host(second_host: int, fits: bool) -> None:
    """The shards of a host's ranks add up; a fifth of its free memory stays free."""
    ranks = [("a", 10, 100), ("a", 10, 100), ("b", second_host - 40, 100), ("b", 40, 100)]
    assert ranks_of(FakeGroup(ranks)).can_copy_checkpoint() is fits


def test_one_rank_that_could_not_write_fails_the_checkpoint(tmp_path: Path) -> None:
    """The error names the rank and its reason; there is no error if all have written."""
    ranks_of(FakeGroup(["", ""])).finish_checkpoint()
    failing = ranks_of(FakeGroup(["", "OSError: No space left on device"]))
    for save in (failing.finish_checkpoint, lambda: failing.save_checkpoint(tmp_path)):
        with pytest.raises(SaveError, match="rank 1: OSError: No space left"):
            save()


def test_the_peak_is_that_of_the_worst_rank() -> None:
    """The maximum of each figure over the ranks; ranks on CPU have none."""
    peaks = [PeakMemory(3, 8), PeakMemory(5, 6)]
    assert ranks_of(FakeGroup(peaks)).take_peak_memory() == PeakMemory(5, 8)
    assert ranks_of(FakeGroup([None, None])).take_peak_memory() is None


def test_each_call_goes_to_the_right_model() -> None:
    """Reference log-probs come from the reference, not from the actor."""
    group = FakeGroup([])
    call_everything(ranks_of(group), group, group)
    assert group.called == ["actor.log_probs", "reference.log_probs", "critic.values",
                               "actor.update", "critic.updates"]  # fmt: skip


def test_a_forward_gets_what_it_reads_and_an_update_everything() -> None:
    """A forward pass gets ids and masks; the other columns stay on the driver."""
    group, batch = FakeGroup([]), make_batch([3, 2])
    ranks = ranks_of(group)
    group.results = [torch.zeros(batch.num_tokens)]
    for role in FORWARD:
        ranks.begin_forward(role, batch)()
        assert group.sent == {"input_ids", "policy_mask"}
    group.results = [{}]
    ranks.update("actor", batch)
    assert group.sent == set(batch.tokens)


def test_the_ranks_of_a_group_get_the_same_shard_and_are_read_once() -> None:
    """Four ranks in two groups share two sequences; actor and critic may have other group sizes."""
    group, batch = FakeGroup([]), make_batch([3, 2])
    ranks = ranks_of(group, ranks_per_shard=2)
    first, second = (ids.tolist() for ids in batch.sequences("input_ids"))
    group.results = [torch.tensor(ids).float() for ids in (first, first, second, second)]
    assert ranks.begin_forward("actor", batch)().tolist() == [*first, *second]
    assert group.ids == [first, first, second, second]
    group.results = [{}] * 4
    ranks.update("actor", batch)
    assert group.ids == [first, first, second, second]
    ranks.begin_updates("critic", [batch])()
    assert sorted(group.ids) == sorted([first, second, [], []])


def test_a_critic_gets_all_mini_batches_in_one_call() -> None:
    """A critic gets its mini-batches in one call, in order.

    With several calls, small ones may overtake others, differently on each rank, and the ranks
    would add up gradients of different mini-batches.
    """
    group = FakeGroup([[{"a": 1.0}, {"a": 2.0}]] * 2)
    minis = [make_batch([2, 2]), make_batch([2, 2])]
    minis[1].tokens["input_ids"] += 100
    pending = ranks_of(group).begin_updates("critic", minis)
    assert group.called == ["critic.updates"] and pending() == [{"a": 1.0}, {"a": 2.0}]
    first, second = (list(mini.sequences("input_ids")) for mini in minis)
    assert group.ids == [[*a.tolist(), *b.tolist()] for a, b in zip(first, second, strict=True)]


def call_everything(ranks: TrainerRanks, *groups: FakeGroup) -> None:
    """Run each forward pass and each update, on groups of one rank."""
    batch = make_batch([3, 2])
    for group in groups:
        group.results = [torch.zeros(batch.num_tokens)]
    for role in FORWARD:
        ranks.begin_forward(role, batch)()
    for group in groups:
        group.results = [{}]
    ranks.update("actor", batch)
    ranks.begin_updates("critic", [batch])()


def test_a_separate_critic_is_called_on_its_own_ranks() -> None:
    """Checkpoints are written and read on both groups."""
    actor, critic = FakeGroup([]), FakeGroup([], "critic rank")
    ranks = ranks_of(actor, critic)
    call_everything(ranks, actor, critic)
    assert actor.called == ["actor.log_probs", "reference.log_probs", "actor.update"]
    assert critic.called == ["critic.values", "critic.updates"]
    ranks.start_checkpoint(Path("folder"))
    ranks.load_checkpoint(Path("folder"))
    assert actor.called[3:] == critic.called[2:] == ["start_checkpoint", "load_checkpoint"]
    actor.results, critic.results = [""], ["OSError: disk"]
    with pytest.raises(SaveError, match="critic rank 0: OSError: disk"):
        ranks.finish_checkpoint()
    actor.results, critic.results = [("a", 30, 100)], [("a", 40, 100), ("b", 40, 100)]
    assert ranks.can_copy_checkpoint()
    critic.results = [("a", 50, 100)]
    assert not ranks.can_copy_checkpoint()
