"""Ports that others are to listen on later."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from verl import ports
from verl.ports import free_port, is_local_host


def test_no_outgoing_connection_takes_one() -> None:
    """A port is not of the range that the kernel gives to connections, so that it stays free."""
    first, last = map(int, ports.EPHEMERAL_RANGE.read_text().split())
    assert not any(first <= free_port() <= last for _ in range(50))


def test_one_that_is_listened_on_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ports of which one is taken, the other is given each time."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        taken.listen()
        held = taken.getsockname()[1]
        draws = [held, held, held - 1 if held > ports.LOWEST_PORT else held + 1]
        monkeypatch.setattr(ports._RANDOM, "randrange", lambda *_: draws.pop(0))
        wanted = draws[-1]
        assert free_port() == wanted


@pytest.mark.parametrize("range_", ["1024 65535", None], ids=["wide", "unknown"])
def test_a_machine_whose_range_leaves_none_still_gives_one(
    range_: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the kernel's range is all there is, or is not told, the kernel chooses."""
    monkeypatch.setattr(ports, "EPHEMERAL_RANGE", tmp_path / "range")
    if range_ is not None:
        ports.EPHEMERAL_RANGE.write_text(range_)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", free_port()))


def test_this_machine_is_known_by_its_names() -> None:
    """Any name or address of it; nobody else's."""
    assert is_local_host("127.0.0.1") and is_local_host("localhost")
    assert not is_local_host("192.0.2.1") and not is_local_host("no-such-host.invalid")
