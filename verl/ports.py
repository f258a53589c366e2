"""TCP ports of this machine that nobody listens on, and whether an address is its own."""

from __future__ import annotations

import itertools
import random
import socket
from pathlib import Path
from typing import Any

EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""First and last of the ports that the kernel gives to connections going out."""
LOWEST_PORT = 10_000
MAX_TRIES = 100
_RANDOM = random.SystemRandom()  # a seeded draw would meet that of another process


def free_port(host: str = "127.0.0.1") -> int:
    """A port at `host` (empty: at all addresses) that is free now.

    It is none of those that the kernel gives to outgoing connections and to listeners without a
    port of their own: one of these could take it before the caller listens on it.
    """
    end = int(EPHEMERAL_RANGE.read_text().split()[0]) if EPHEMERAL_RANGE.exists() else LOWEST_PORT
    drawn = (
        _RANDOM.randrange(LOWEST_PORT, end) for _ in range(MAX_TRIES if end > LOWEST_PORT else 0)
    )
    for port in itertools.chain(drawn, (0,)):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise OSError(f"no port is free at {host or 'any address'}")


def is_local_host(host: str) -> bool:
    """Whether a name or address is one of this machine: only such an address can be bound to."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in found)


def _can_bind(family: int, address: Any) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True
