"""The estimate of a run's current phase."""

from tests.nightly.proofs.kills.phases import phase_of

ROW = {"step": 1.0, "timing_s/gen": 2.0, "timing_s/update_actor": 1.0, "timing_s/step": 3.0}


def test_the_phase_follows_the_time() -> None:
    """Generation first, then the update, then the time between two steps."""
    phases = [phase_of(since, [ROW], False) for since in (1.0, 2.5, 3.5)]
    assert phases == ["gen", "update_actor", "between steps"]


def test_saving_and_starting_are_phases() -> None:
    """A half-written checkpoint means saving; before a start's first row, the run is starting."""
    assert phase_of(1.0, [ROW], True) == "saving"
    assert phase_of(None, [ROW], False) == "starting"
    assert phase_of(1.0, [], False) == "starting"
