"""Policy of the addresses that pages may be fetched from: public addresses only.

The URLs of search results and redirects are untrusted. A host name is resolved once, all of its
addresses are checked, and the connection is made to a checked address, so that a second resolution
cannot lead elsewhere.
"""

import ipaddress
import socket
from dataclasses import dataclass

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
"""The IPv6 addresses of machines on the internet. All others are special: loopback, link-local,
unique local, multicast, IPv4-mapped ..."""
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
"""Prefix of NAT64 gateways; the embedded IPv4 address is checked instead."""
SERVICES = tuple(
    ipaddress.ip_network(network)
    for network in (
        # Special, but global for Python: AMT, AS112, 6to4 and its relays, Teredo and others.
        "192.0.0.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24", "192.175.48.0/24",
        "2001::/23", "2002::/16", "2620:4f:8000::/48", "3fff::/20",
        "168.63.129.16/32",  # an internal service of a cloud
    )
)  # fmt: skip


class AddressRefused(Exception):
    """A page is at an address from which pages may not be fetched."""


@dataclass(frozen=True)
class AddressPolicy:
    """Allows public addresses at the usual ports, and explicitly allowed networks."""

    ports: frozenset[int] = frozenset({80, 443})
    allowed: tuple[Network, ...] = ()
    """Networks that are allowed although they are not public."""

    def resolve(self, host: str, port: int) -> list[str]:
        """Return the addresses of `host`; raises AddressRefused if one of them is not allowed."""
        if port not in self.ports:
            ports = ", ".join(map(str, sorted(self.ports)))
            raise AddressRefused(f"port {port} of {host!r}; pages are fetched from ports {ports}")
        try:
            answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, ValueError) as error:  # ValueError: an invalid name
            raise AddressRefused(f"{host!r} has no address ({error})") from error
        addresses = list(dict.fromkeys(str(answer[4][0]) for answer in answers))
        for address in map(ipaddress.ip_address, addresses):
            if not is_public(address) and not any(address in network for network in self.allowed):
                raise AddressRefused(f"{host!r} is at {address}, which is not a public address")
        return addresses


def is_public(address: Address) -> bool:
    """Return whether an address belongs to a machine on the internet, not to a special service."""
    if isinstance(address, ipaddress.IPv6Address):
        if address in NAT64:
            address = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        elif address not in GLOBAL_UNICAST or address.scope_id is not None:
            return False
    is_service = any(address in network for network in SERVICES)
    return address.is_global and not address.is_multicast and not is_service
