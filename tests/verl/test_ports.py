"""Free ports to listen on later, and local addresses."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from verl import ports
from verl.ports import free_port, is_local_host


def test_ports_are_outside_the_ephemeral_range() -> None:
    """The kernel does not give such a port to an outgoing connection, so that it stays free."""
    first, last = map(int, ports.EPHEMERAL_RANGE.read_text().split())
    assert not any(first <= free_port() <= last for _ in range(50))


def test_a_port_in_use_is_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """If one of two drawn ports is in use, the other one is returned."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        taken.listen()
        used = taken.getsockname()[1]
        draws = [used, used, used - 1 if used > ports.LOWEST_PORT else used + 1]
        monkeypatch.setattr(ports._RANDOM, "randrange", lambda *_: draws.pop(0))
        expected = draws[-1]
        assert free_port() == expected


@pytest.mark.parametrize("range_", ["1024 65535", None], ids=["wide", "unknown"])
def test_the_kernel_chooses_if_no_port_is_outside_its_range(
    range_: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ephemeral range covers all ports, or is unknown."""
    monkeypatch.setattr(ports, "EPHEMERAL_RANGE", tmp_path / "range")
    if range_ is not None:
        ports.EPHEMERAL_RANGE.write_text(range_)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", free_port()))


def test_local_names_and_addresses_are_recognised() -> None:
    """Those of this machine, and no others."""
    assert is_local_host("127.0.0.1") and is_local_host("localhost")
    assert not is_local_host("192.0.2.1") and not is_local_host("no-such-host.invalid")
