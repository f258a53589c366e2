"""The address policy: every spelling of a private address is refused."""

import ipaddress
import socket
from typing import Any

import httpcore
import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_r1.online import addresses
from search_r1.online.addresses import AddressPolicy, AddressRefused, is_public
from search_r1.online.fetch import Deadline, PageError, PageFetcher

REGISTRIES = [
    "0.0.0.0/8", "0.0.0.0/32", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16",
    "172.16.0.0/12", "192.0.0.0/24", "192.0.0.0/29", "192.0.0.8/32", "192.0.0.9/32",
    "192.0.0.10/32", "192.0.0.170/32", "192.0.0.171/32", "192.0.2.0/24", "192.31.196.0/24",
    "192.52.193.0/24", "192.88.99.0/24", "192.88.99.2/32", "192.168.0.0/16", "192.175.48.0/24",
    "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "240.0.0.0/4", "255.255.255.255/32",
    "::1/128", "::/128", "::ffff:0:0/96", "64:ff9b:1::/48", "100::/64", "100:0:0:1::/64",
    "2001::/23", "2001::/32", "2001:1::1/128", "2001:1::2/128", "2001:1::3/128", "2001:2::/48",
    "2001:3::/32", "2001:4:112::/48", "2001:10::/28", "2001:20::/28", "2001:30::/28",
    "2001:db8::/32", "2002::/16", "2620:4f:8000::/48", "3fff::/20", "5f00::/16", "fc00::/7",
    "fe80::/10", "224.0.0.0/4", "ff00::/8", "fec0::/10", "168.63.129.16/32",
]  # fmt: skip
"""All entries of IANA's registries of special-purpose addresses except NAT64, both multicast
networks, the former site-local addresses, and an internal address of a cloud."""
SPECIAL = [ipaddress.ip_network(network) for network in REGISTRIES]
EMBEDDED = [
    "::127.0.0.1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254",
    "::ffff:8.8.8.8", "::ffff:0:8.8.8.8", "::8.8.8.8", "64:ff9b::10.0.0.1", "64:ff9b::127.0.0.1",
    "64:ff9b::192.0.0.192", "64:ff9b::a83f:8110", "64:ff9b:1::808:808", "2002:7f00:1::1",
    "2002:808:808::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2", "fe80::1%lo", "fe80::1%25eth0",
    "2606:4700::1111%lo", "::1%lo", "fd00:ec2::254", "fd20:ce::254", "100.100.100.200",
    "192.0.0.192", "169.254.169.254", "169.254.170.2", "168.63.129.16", "192.88.99.1",
    "2620:4f:8000::6", "3fff:fff:ffff::1", "4000::1", "1fff:ffff::1", "6000::1", "8000::1",
    "e000::1", "200::1", "f000::1", "fdff::1", "ff0e::1",
]  # fmt: skip
"""IPv6 forms of IPv4 addresses, zones, metadata services, and unassigned IPv6 addresses."""
PRIVATE = [*dict.fromkeys(str(n[index]) for n in SPECIAL for index in (0, -1)), *EMBEDDED]
PUBLIC = [
    "1.1.1.1", "8.8.8.8", "9.255.255.255", "11.0.0.0", "93.184.216.34", "100.63.255.255",
    "100.128.0.0", "126.255.255.255", "128.0.0.0", "169.253.255.255", "169.255.0.0",
    "172.15.255.255", "172.32.0.0", "191.255.255.255", "192.0.1.0", "192.0.1.255", "192.0.3.0",
    "192.31.195.255", "192.31.197.0", "192.52.192.255", "192.52.194.0", "192.88.98.255",
    "192.88.100.0", "192.167.255.255", "192.169.0.0", "192.175.47.255", "192.175.49.0",
    "198.17.255.255", "198.20.0.0", "198.51.99.255", "198.51.101.0", "203.0.112.255", "203.0.114.0",
    "223.255.255.255", "168.63.129.15", "168.63.129.17", "2000::1", "2001:200::1",
    "2001:db7:ffff::1", "2001:db9::1", "2003::1", "2400::1", "2606:4700::1111",
    "2606:2800:220:1:248:1893:25c8:1946", "2620:4f:7fff::1", "2620:4f:8001::1", "2a00::1",
    "3000::1", "3ffe::1", "64:ff9b::808:808", "64:ff9b::101:101",
]  # fmt: skip


def resolve_to(monkeypatch: pytest.MonkeyPatch, *resolved: str) -> list[str]:
    """Make all names resolve to `resolved`; returns a list that records the names."""
    names: list[str] = []

    def answer(host: str, port: int, **kind: Any) -> list[Any]:
        names.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, port)) for a in resolved]

    monkeypatch.setattr(addresses.socket, "getaddrinfo", answer)
    return names


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses_are_refused(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """A name that resolves to a private address is refused, also if it has a public one too."""
    for resolved in ([address], [PUBLIC[0], address]):
        resolve_to(monkeypatch, *resolved)
        with pytest.raises(AddressRefused):
            AddressPolicy().resolve("example.org", 443)


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_are_allowed(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """A name that resolves to a public address is allowed."""
    resolve_to(monkeypatch, address, address)
    assert AddressPolicy().resolve("example.org", 443) == [address]


@pytest.mark.parametrize(
    "host",
    [
        "2130706433",
        "0x7f000001",
        "0x7F.0.0.1",
        "0177.0.0.1",
        "017700000001",
        "127.1",
        "127.0.1",
        "0x7f.1",
        "0",
        "0.0",
        "00",
        "localhost",
        "LOCALHOST",
        "::1",
        "0:0:0:0:0:0:0:1",
        "::ffff:127.0.0.1",
        "::ffff:7f00:1",
        "::1%lo",
        "0177.1",
    ],
)
def test_odd_spellings_of_this_machine_are_refused(host: str) -> None:
    """Decimal, hexadecimal, octal and short forms of local addresses are refused."""
    with pytest.raises(AddressRefused):
        AddressPolicy().resolve(host, 80)


@pytest.mark.parametrize("port", [22, 25, 6379, 8000])
def test_other_ports_are_refused(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """Other ports than those of the web are refused before the name is resolved."""
    names = resolve_to(monkeypatch, PUBLIC[0])
    with pytest.raises(AddressRefused, match=f"port {port}"):
        AddressPolicy().resolve("example.org", port)
    assert names == []


def test_only_the_given_networks_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An explicitly allowed network allows only its own addresses."""
    policy = AddressPolicy(allowed=(ipaddress.ip_network("10.1.0.0/16"),))
    resolve_to(monkeypatch, "10.1.2.3")
    assert policy.resolve("intranet", 80) == ["10.1.2.3"]
    resolve_to(monkeypatch, "10.2.2.3")
    with pytest.raises(AddressRefused):
        policy.resolve("intranet", 80)


@pytest.mark.parametrize("host", ["a" * 300 + ".org", "no-such-host.invalid", "\u2024.", "a\0"])
def test_names_without_address_are_refused(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """A name that cannot be resolved, or is invalid, is refused."""

    def answer(host: str, port: int, **kind: Any) -> Any:
        host.encode("idna")  # as the real resolver does first
        raise ValueError("embedded null") if "\0" in host else socket.gaierror("unknown")

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    with pytest.raises(AddressRefused):
        AddressPolicy().resolve(host, 80)


def test_connects_to_the_checked_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is resolved once, and the connection is made to that address, not to the name."""
    names = resolve_to(monkeypatch, PUBLIC[0])
    connected: list[tuple[str, int]] = []

    async def connect(self: Any, host: str, port: int, *more: Any, **kind: Any) -> Any:
        connected.append((host, port))
        raise httpcore.ConnectError("enough")

    monkeypatch.setattr(httpcore.AnyIOBackend, "connect_tcp", connect)
    fetcher = PageFetcher(AddressPolicy(), 1000)
    with pytest.raises(PageError):
        fetcher.fetch("https://example.org/", Deadline(5))
    assert (names, connected) == (["example.org"], [(PUBLIC[0], 443)])


@given(st.one_of(st.ip_addresses(), st.ip_addresses(network="2000::/3")))
def test_agrees_with_the_registries_on_any_address(address: addresses.Address) -> None:
    """An address is public if it is in no registry and Python's list calls it global."""
    special = any(address in network for network in SPECIAL)
    if address in ipaddress.ip_network("64:ff9b::/96"):
        return
    if is_public(address):
        assert address.is_global and not address.is_multicast and not special
    elif address.version == 4 or address in ipaddress.ip_network("2000::/3"):
        assert special
