"""Signals and the deadline: a run ends between steps, or while it samples."""

import os
import signal
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from verl.config import Config
from verl.errors import Interrupted
from verl.ext.stopping import MARGIN_S, Stopper, hook, run_deadline


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_waits_for_the_weights_to_be_those_of_a_finished_step(number: int) -> None:
    """Outside of sampling nothing happens until the next check; handlers are restored after."""
    before = signal.getsignal(number)
    stopper = Stopper()
    with stopper.handling_signals():
        stopper.check()
        os.kill(os.getpid(), number)
        reached = True
        with pytest.raises(Interrupted, match=signal.Signals(number).name):
            stopper.check()
        with pytest.raises(Interrupted), stopper.interruptible():
            pytest.fail("a run that was asked to stop must not sample")
    assert reached
    assert signal.getsignal(number) is before


def test_a_signal_ends_sampling_at_once() -> None:
    """A generation of minutes is interrupted; the exception is Ctrl-C's, which Ray lets pass."""
    stopper = Stopper()
    with stopper.handling_signals(), pytest.raises(KeyboardInterrupt), stopper.interruptible():
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("the signal should have ended this")
    assert stopper.reason == "the run received SIGTERM"


def test_only_a_second_sigterm_does_what_it_did_before() -> None:
    """Slurm sends SIGUSR1, then SIGTERM: both request a save; a second SIGTERM ends at once."""
    ended: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))
    try:
        with Stopper().handling_signals():
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGTERM)
            assert ended == []
            os.kill(os.getpid(), signal.SIGTERM)
            assert ended == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_step_that_might_not_fit_is_not_started() -> None:
    """The longest step and save so far decide, with a margin; the first step is always started."""
    now = 1000.0
    stopper = Stopper(deadline=2000.0, save_s=lambda: 100.0, clock=lambda: now)
    now = 1999.0
    stopper.check()
    now = 1000.0
    trainer: Any = None  # a stopper does not look at it
    stopper.on_step_begin(trainer)
    now = 1300.0
    stopper.on_step_end(trainer, {})
    now = 2000.0 - 400.0 - MARGIN_S
    stopper.check()
    now += 1.0
    with pytest.raises(Interrupted, match="400 s"):
        stopper.check()


def test_the_deadline_is_an_option_or_slurms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Minutes count from the start of the process; without the option, Slurm's job end is used."""
    started = psutil.Process().create_time()
    assert run_deadline(2.0, {"SLURM_JOB_END_TIME": "5"}) == pytest.approx(started + 120.0)
    assert run_deadline(None, {"SLURM_JOB_END_TIME": "1700000000"}) == 1.7e9
    assert run_deadline(None, {}) is None


def test_the_expected_duration_of_a_save() -> None:
    """It is estimated by size at first (6 GB at 200 MB/s), then it is that of the longest save."""
    parts: Any = SimpleNamespace(
        config=Config(), saver=SimpleNamespace(longest_s=0.0),
        ranks=SimpleNamespace(groups=[
            SimpleNamespace(call=lambda method: [("a", 1_000_000_000, 0), ("a", 2_000_000_000, 0)])
        ] * 2),
    )  # fmt: skip
    stopper = hook(parts)
    assert stopper.save_s() == 30.0
    parts.saver.longest_s = 2.0
    assert stopper.save_s() == 2.0
