"""What the driver makes of the answers of all ranks: checkpoints, memory, cards, seconds."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.verl.training.ranks import make_batch
from verl.errors import SaveError
from verl.single_controller.actors import ActorLocation
from verl.trainer.ranks import BatchSharding, TrainerRanks
from verl.training.devices import PeakMemory
from verl.training.weight_stream import TransferStats


class Answers:
    """A group whose ranks give the same answers to whatever is called."""

    def __init__(self, answers: Sequence[Any], name: str = "rank") -> None:
        self.answers, self.name = answers, name
        self.called: list[str] = []
        self.sent = set[str]()
        self.ids: list[list[int]] = []

    def __len__(self) -> int:
        return len(self.answers)

    def begin(self, method: str, *arguments: Any) -> Callable[[], list[Any]]:
        self.called.append(method)
        return lambda: list(self.answers)

    def begin_scatter(self, method: str, shards: Sequence[Any]) -> Callable[[], list[Any]]:
        given = [shard if isinstance(shard, tuple) else (shard,) for shard in shards]
        self.sent = set(given[0][0].tokens)
        self.ids = [[i for x in own for i in x.tokens["input_ids"].tolist()] for own in given]
        return self.begin(method)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        return list(self.answers)

    def scatter(self, method: str, shards: Sequence[Any], *arguments: Any) -> list[Any]:
        return list(self.answers)

    def locations(self) -> list[ActorLocation]:
        return [ActorLocation("node", "host", ()) for _ in self.answers]


def ranks_of(*groups: Any) -> TrainerRanks:
    """The ranks of such groups."""
    return TrainerRanks(*groups)


@pytest.mark.parametrize(("second_host", "fits"), [(79, True), (81, False)])
def test_a_copy_must_fit_on_every_host(second_host: int, fits: bool) -> None:
    """Shards of a host's ranks add up; a fifth of its free memory is left alone."""
    room = [("a", 10, 100), ("a", 10, 100), ("b", second_host - 40, 100), ("b", 40, 100)]
    assert ranks_of(Answers(room)).can_copy_checkpoint() is fits


def test_one_rank_that_could_not_write_fails_the_checkpoint(tmp_path: Path) -> None:
    """The error names the rank and its reason; where all wrote there is none."""
    ranks_of(Answers(["", ""])).finish_checkpoint()
    failing = ranks_of(Answers(["", "OSError: No space left on device"]))
    for save in (failing.finish_checkpoint, lambda: failing.save_checkpoint(tmp_path)):
        with pytest.raises(SaveError, match="rank 1: OSError: No space left"):
            save()


def test_the_peak_is_that_of_the_worst_rank() -> None:
    """Of each figure, which may be another rank's; ranks on CPU have none."""
    answers = [PeakMemory(3, 8), PeakMemory(5, 6)]
    assert ranks_of(Answers(answers)).take_peak_memory() == PeakMemory(5, 8)
    assert ranks_of(Answers([None, None])).take_peak_memory() is None


@pytest.mark.parametrize(
    ("card", "peak"), [(("NVIDIA H200", "bfloat16"), 989e12), (("", "float32"), None)]
)
def test_the_ranks_know_what_their_card_can_do(card: tuple[str, str], peak: float | None) -> None:
    """The driver need not have one itself."""
    assert ranks_of(Answers([card, card])).peak_flops() == peak


def test_the_weights_are_written_when_the_slowest_node_is_done(tmp_path: Path) -> None:
    """Ranks that write nothing say 0."""
    ranks = ranks_of(Answers([1.5, 0.0, 2.5, 0.0]))
    assert ranks.share_policy(tmp_path, 1, [], "bfloat16", is_adapter=False) == 2.5


def test_what_was_sent_is_told_once() -> None:
    """Bytes of all ranks, and where one looked, the share that changed; the slowest's seconds."""
    ranks = ranks_of(Answers([TransferStats(1.0, 300, 1, 4), TransferStats(2.0, 100)]))
    assert ranks.send_policy("nccl:", ["card"], "bfloat16") == 2.0
    told = {"perf/weights_sent_bytes": 400.0, "perf/weights_changed_share": 0.25}
    assert [ranks.take_transfer_metrics(), ranks.take_transfer_metrics()] == [told, {}]
    ranks = ranks_of(Answers([TransferStats(1.0, 300)]))
    ranks.send_policy("nccl:", ["card"], "bfloat16")
    assert ranks.take_transfer_metrics() == {"perf/weights_sent_bytes": 300.0}


def test_each_question_goes_to_the_model_that_it_is_about() -> None:
    """Reference log-probs are the reference's, not the actor's."""
    recorded = Answers([])
    ask_everything(ranks_of(recorded), recorded, recorded)
    assert recorded.called == ["actor.log_probs", "reference.log_probs", "critic.values",
                               "actor.update", "critic.updates"]  # fmt: skip


def test_a_forward_gets_what_it_reads_and_an_update_everything() -> None:
    """Ids and masks; whatever else a step knows of its tokens stays with the driver."""
    recorded, batch = Answers([]), make_batch([3, 2])
    ranks = ranks_of(recorded)
    recorded.answers = [torch.zeros(batch.num_tokens)]
    for ask in (ranks.log_probs, ranks.ref_log_probs, lambda some: ranks.begin_values(some)()):
        ask(batch)
        assert recorded.sent == {"input_ids", "policy_mask"}
    recorded.answers = [{}]
    ranks.update_actor(batch)
    assert recorded.sent == set(batch.tokens)


def test_the_ranks_of_a_group_get_the_same_shard_and_are_read_once() -> None:
    """Four ranks in two groups share two sequences; actor and critic may have other group sizes."""
    ranks, batch = Answers([]), make_batch([3, 2])
    trainer = TrainerRanks(ranks, policy=BatchSharding(sp_size=2))  # type: ignore[arg-type]
    first, second = (ids.tolist() for ids in batch.sequences("input_ids"))
    ranks.answers = [
        torch.tensor([float(i) for i in ids]) for ids in (first, first, second, second)
    ]
    assert trainer.log_probs(batch).tolist() == [*first, *second]
    assert ranks.ids == [first, first, second, second]
    ranks.answers = [{}] * 4
    trainer.update_actor(batch)
    assert ranks.ids == [first, first, second, second]
    trainer.begin_update_critic([batch])()
    assert sorted(ranks.ids) == sorted([first, second, [], []])


def test_a_critic_is_told_once_of_all_that_it_learns_from() -> None:
    """In order: of several calls Ray lets small ones overtake, on each rank others, and the ranks
    would add up gradients of different mini-batches."""
    group, minis = Answers([[{"a": 1.0}, {"a": 2.0}]] * 2), [make_batch([2, 2]), make_batch([2, 2])]
    minis[1].tokens["input_ids"] += 100
    told = ranks_of(group).begin_update_critic(minis)
    assert group.called == ["critic.updates"] and told() == [{"a": 1.0}, {"a": 2.0}]
    first, second = (list(mini.sequences("input_ids")) for mini in minis)
    assert group.ids == [[*a.tolist(), *b.tolist()] for a, b in zip(first, second, strict=True)]


def ask_everything(ranks: TrainerRanks, *groups: Answers) -> None:
    """Each pass and each update, of groups of a rank."""
    batch = make_batch([3, 2])
    for group in groups:
        group.answers = [torch.zeros(batch.num_tokens)]
    ranks.log_probs(batch)
    ranks.ref_log_probs(batch)
    ranks.begin_values(batch)()
    for group in groups:
        group.answers = [{}]
    ranks.update_actor(batch)
    ranks.begin_update_critic([batch])()


def test_a_critic_with_ranks_of_its_own_is_asked_there() -> None:
    """And checkpoints are written and read, and rates lowered, by both groups."""
    actor, critic = Answers([]), Answers([], "critic rank")
    ranks = ranks_of(actor, critic)
    ask_everything(ranks, actor, critic)
    assert actor.called == ["actor.log_probs", "reference.log_probs", "actor.update"]
    assert critic.called == ["critic.values", "critic.updates"]
    ranks.start_checkpoint(Path("folder"))
    ranks.load_checkpoint(Path("folder"))
    ranks.scale_lr(0.5)
    assert actor.called[3:] == critic.called[2:] == [
        "start_checkpoint", "load_checkpoint", "scale_lr"]  # fmt: skip
    actor.answers, critic.answers = [""], ["OSError: disk"]
    with pytest.raises(SaveError, match="critic rank 0: OSError: disk"):
        ranks.finish_checkpoint()
    actor.answers, critic.answers = [("a", 30, 100)], [("a", 40, 100), ("b", 40, 100)]
    assert ranks.checkpoint_bytes() == 110 and ranks.can_copy_checkpoint()
    critic.answers = [("a", 50, 100)]
    assert not ranks.can_copy_checkpoint()
