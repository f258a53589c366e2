"""Where pages may be fetched from: every spelling of a private address is refused."""

import ipaddress
import socket
from typing import Any

import pytest

from search_r1.online import addresses
from search_r1.online.addresses import (
    AddressPolicy,
    AddressRefused,
    CheckedBackend,
)

PRIVATE = [
    "127.0.0.1",
    "127.8.8.8",
    "0.0.0.0",
    "10.1.2.3",
    "172.16.0.1",
    "192.168.1.1",
    "100.64.0.1",
    "169.254.169.254",
    "168.63.129.16",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::127.0.0.1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "::ffff:169.254.169.254",
    "64:ff9b::10.0.0.1",
    "64:ff9b:1::1",
    "2002:7f00:1::1",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2",
    "fe80::1",
    "fe80::1%lo",
    "fc00::1",
    "fd00:ec2::254",
    "fec0::1",
    "ff02::1",
    "2001:db8::1",
]
PUBLIC = ["93.184.216.34", "8.8.8.8", "2606:2800:220:1:248:1893:25c8:1946", "64:ff9b::808:808"]


def resolving(monkeypatch: pytest.MonkeyPatch, *found: str) -> list[str]:
    """Makes every name resolve to `found`; the names that were asked for."""
    asked: list[str] = []

    def answer(host: str, port: int, **kind: Any) -> list[Any]:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in found]

    monkeypatch.setattr(addresses.socket, "getaddrinfo", answer)
    return asked


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses_are_refused(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """A name at such an address is refused, alone and beside a public one."""
    for found in ([address], [PUBLIC[0], address]):
        resolving(monkeypatch, *found)
        with pytest.raises(AddressRefused, match="not a public address"):
            AddressPolicy().resolve("example.org", 443)


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_are_allowed(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """A name at a public address leads there."""
    resolving(monkeypatch, address, address)
    assert AddressPolicy().resolve("example.org", 443) == [address]


@pytest.mark.parametrize(
    "host", ["2130706433", "0x7f000001", "0177.0.0.1", "127.1", "0", "localhost", "[::1]", "::1"]
)
def test_odd_spellings_of_this_machine_are_refused(host: str) -> None:
    """Decimal, hexadecimal, octal and short hosts are what the resolver makes of them."""
    with pytest.raises(AddressRefused):
        AddressPolicy().resolve(host, 80)


@pytest.mark.parametrize("port", [22, 25, 6379, 8000])
def test_other_ports_are_refused(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """Only the web's ports, and the name is not even resolved."""
    asked = resolving(monkeypatch, PUBLIC[0])
    with pytest.raises(AddressRefused, match=f"port {port}"):
        AddressPolicy().resolve("example.org", port)
    assert asked == []


def test_allowed_networks_are_allowed_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """An explicit network opens itself only."""
    policy = AddressPolicy(allowed=(ipaddress.ip_network("10.1.0.0/16"),))
    resolving(monkeypatch, "10.1.2.3")
    assert policy.resolve("intranet", 80) == ["10.1.2.3"]
    resolving(monkeypatch, "10.2.2.3")
    with pytest.raises(AddressRefused):
        policy.resolve("intranet", 80)


@pytest.mark.parametrize("host", ["a" * 300 + ".org", "no-such-host.invalid", "\u2024."])
def test_names_without_address_are_refused(host: str) -> None:
    """A name that cannot be resolved is the same typed error."""
    with pytest.raises(AddressRefused):
        AddressPolicy().resolve(host, 80)


def test_connects_to_what_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is resolved once, and the connection is made to that address, not to the name."""
    asked = resolving(monkeypatch, PUBLIC[0])
    connected: list[tuple[str, int]] = []

    def connect(self: Any, host: str, port: int, *more: Any) -> str:
        connected.append((host, port))
        return "stream"

    monkeypatch.setattr(addresses.httpcore.SyncBackend, "connect_tcp", connect)
    assert CheckedBackend(AddressPolicy()).connect_tcp("example.org", 443) == "stream"
    assert (asked, connected) == (["example.org"], [(PUBLIC[0], 443)])
    with pytest.raises(AddressRefused):
        CheckedBackend(AddressPolicy()).connect_unix_socket("/run/service.sock")
