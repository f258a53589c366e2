"""The plan of kills."""

from collections import Counter

from tests.nightly.proofs.kills.schedule import Moment, Victim, plan


def test_every_kind_of_process_is_killed() -> None:
    """Of 20 kills, 4 are planned for each kind of process, and 4 during saving."""
    kills = plan(20, seed=0, step_seconds=2.0)
    assert [kill.number for kill in kills] == list(range(1, 21))
    by_choice = Counter(kill.victim for kill in kills if kill.moment is not Moment.SAVING)
    assert by_choice == dict.fromkeys(Victim, 4)


def test_the_seed_decides() -> None:
    """The same seed gives the same plan, another seed another plan."""
    assert plan(5, 1, 2.0) == plan(5, 1, 2.0) != plan(5, 2, 2.0)


def test_kills_during_saving_hit_processes_that_save() -> None:
    """Engines do not write checkpoints."""
    saving = [kill for kill in plan(50, 3, 2.0) if kill.moment is Moment.SAVING]
    assert {kill.victim for kill in saving} == {Victim.DRIVER, Victim.RANK}
