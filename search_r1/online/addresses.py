"""Which machines a page may be fetched from: public ones only, decided on resolved addresses.

Search results are text from strangers, and so are redirects. A name is resolved once, every address
of it is checked, and the connection goes to a checked address, so that no second resolution can
lead elsewhere.
"""

import ipaddress
import socket
from dataclasses import dataclass

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
"""All of IPv6 that machines of the internet have; what is outside is special by itself: loopback,
link-local, unique local, multicast, IPv4-mapped ..."""
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
"""A gateway's prefix: what counts is the IPv4 address behind it."""
SPECIAL = tuple(
    ipaddress.ip_network(network)
    for network in (
        # IANA's registries of special-purpose addresses, also the rows that are reachable: they are
        # services of networks (AS112, AMT, 6to4, Teredo), not machines that have pages.
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16",
        "172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24",
        "192.88.99.0/24", "192.168.0.0/16", "192.175.48.0/24", "198.18.0.0/15", "198.51.100.0/24",
        "203.0.113.0/24", "240.0.0.0/4",
        "2001::/23", "2001:db8::/32", "2002::/16", "2620:4f:8000::/48", "3fff::/20",
        "224.0.0.0/4",  # multicast has a registry of its own
        "168.63.129.16/32",  # public, but a cloud's own service to its machines
    )
)  # fmt: skip


class AddressRefused(Exception):
    """A page lies where no page may be fetched from."""


@dataclass(frozen=True)
class AddressPolicy:
    """Public addresses at the usual ports, and the networks that are allowed by name."""

    ports: frozenset[int] = frozenset({80, 443})
    allowed: tuple[Network, ...] = ()
    """Networks outside the public internet that may be fetched from all the same."""

    def resolve(self, host: str, port: int) -> list[str]:
        """Addresses of `host` to connect to; AddressRefused where one of them is not public."""
        if port not in self.ports:
            ports = ", ".join(map(str, sorted(self.ports)))
            raise AddressRefused(f"port {port} of {host!r}; pages are fetched from ports {ports}")
        try:
            answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, ValueError) as error:  # ValueError: what can be no name
            raise AddressRefused(f"{host!r} has no address ({error})") from error
        addresses = list(dict.fromkeys(str(answer[4][0]) for answer in answers))
        for address in map(ipaddress.ip_address, addresses):
            if not is_public(address) and not any(address in network for network in self.allowed):
                raise AddressRefused(f"{host!r} is at {address}, which is not a public address")
        return addresses


def is_public(address: Address) -> bool:
    """Whether any machine on the internet could be reached there, and no cloud's own service."""
    if isinstance(address, ipaddress.IPv6Address):
        if address in NAT64:
            address = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        elif address not in GLOBAL_UNICAST or address.scope_id is not None:
            return False
    return not any(address in network for network in SPECIAL)
