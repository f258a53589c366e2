"""Which machines a page may be fetched from: public ones only, decided on resolved addresses.

Search results are text from strangers, and so are redirects. A name is resolved once, every address
of it is checked, and the connection goes to a checked address, so that no second resolution can
lead elsewhere.
"""

import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import httpcore

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
CLOUD_HOSTS = frozenset({ipaddress.IPv4Address("168.63.129.16")})
"""A public address that is a cloud's own service to its machines."""


class AddressRefused(Exception):
    """A page lies where no page may be fetched from."""


@dataclass(frozen=True)
class AddressPolicy:
    """Public addresses at the usual ports, and the networks that are allowed by name."""

    ports: frozenset[int] = frozenset({80, 443})
    allowed: tuple[Network, ...] = ()
    """Networks outside the public internet that may be fetched from all the same."""

    def resolve(self, host: str, port: int) -> list[str]:
        """Addresses of `host` that may be connected to; raises AddressRefused.

        One address that is not public condemns the name.
        """
        if port not in self.ports:
            raise AddressRefused(f"port {port} of {host!r}; pages are fetched from {self._named()}")
        try:
            answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise AddressRefused(f"{host!r} has no address ({error})") from error
        addresses = list(dict.fromkeys(str(answer[4][0]) for answer in answers))
        for address in addresses:
            self._check(host, ipaddress.ip_address(address.partition("%")[0]))
        return addresses

    def _check(self, host: str, address: Address) -> None:
        if any(address in network for network in self.allowed):
            return
        if not all(is_public(inner) for inner in leads_to(address)):
            raise AddressRefused(f"{host!r} is at {address}, which is not a public address")

    def _named(self) -> str:
        return "ports " + ", ".join(map(str, sorted(self.ports)))


def is_public(address: Address) -> bool:
    """Whether any machine on the internet could be reached there, and no cloud's own service."""
    special = (
        address.is_private
        or address.is_loopback
        or address.is_link_local
        or address.is_multicast
        or address.is_reserved
        or address.is_unspecified
        or (isinstance(address, ipaddress.IPv6Address) and address.is_site_local)
    )
    return address.is_global and not special and address not in CLOUD_HOSTS


def leads_to(address: Address) -> list[Address]:
    """The address and the IPv4 ones that an IPv6 one carries: mapped, 6to4, Teredo and NAT64."""
    if not isinstance(address, ipaddress.IPv6Address):
        return [address]
    if address in NAT64:  # a gateway's prefix: only what is behind it counts
        return [ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)]
    carried = (address, address.ipv4_mapped, address.sixtofour, *(address.teredo or ()))
    return [found for found in carried if found is not None]


class CheckedBackend(httpcore.SyncBackend):
    """Connections of httpcore to addresses that the policy has checked; TLS is to the name."""

    def __init__(self, policy: AddressPolicy) -> None:
        self._policy = policy

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        """A connection to the first address that answers; raises AddressRefused."""
        failure: Exception | None = None
        for address in self._policy.resolve(host, port):
            try:
                return super().connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure or AddressRefused(f"{host!r} has no address")

    def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        """Never: a page is not on this machine."""
        raise AddressRefused(f"unix socket {path!r}")
