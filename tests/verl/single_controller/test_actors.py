"""Work for which a controller waits no longer than it may."""

import threading

import pytest

from verl.single_controller.actors import bounded


def test_work_that_never_ends_is_left_behind() -> None:
    """Ray's client waits for ever for a Ray that has ended."""
    never, done = threading.Event(), list[int]()
    assert bounded(lambda: done.append(1), 30.0) and done == [1]
    assert not bounded(never.wait, 0.05)
    never.set()
    with pytest.raises(ZeroDivisionError):
        bounded(lambda: 1 / 0, 30.0)
