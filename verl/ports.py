"""Free TCP ports of this machine, and whether an address belongs to it."""

import itertools
import random
import socket
from pathlib import Path
from typing import Any

EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""File with the first and last of the ephemeral ports, used for outgoing connections."""
LOWEST_PORT = 10_000
MAX_TRIES = 100
_RANDOM = random.SystemRandom()  # not seeded: processes must not draw the same ports


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port of `host` (empty: of all addresses) that is free now.

    Ephemeral ports are avoided if possible, because the kernel could give one to an outgoing
    connection, or to a listener on port 0, before the caller listens on it.
    """
    end = int(EPHEMERAL_RANGE.read_text().split()[0]) if EPHEMERAL_RANGE.exists() else LOWEST_PORT
    num_tries = MAX_TRIES if end > LOWEST_PORT else 0
    drawn = (_RANDOM.randrange(LOWEST_PORT, end) for _ in range(num_tries))
    for port in itertools.chain(drawn, (0,)):  # 0 lets the kernel choose
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise OSError(f"no port is free at {host or 'any address'}")


def is_local_host(host: str) -> bool:
    """Whether a host name or address belongs to this machine, that is, whether it can be bound."""
    try:
        addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in addresses)


def _can_bind(family: int, address: Any) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True
