"""Which proxy our HTTP clients use: that of the environment, and none for this machine.

Servers on this machine (an engine, a page) cannot be reached through a proxy. The
variables are those of curl: `HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY`, in capitals or
not. Needs no torch.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator
from typing import Any

from verl.errors import ConfigError, explain

SCHEMES = ("http", "https", "socks5", "socks5h")
LOCAL = ("localhost", "127.0.0.1", "::1", "0.0.0.0")  # compared, never bound
"""Addresses of this machine, as `NO_PROXY` names them; each library reads that variable."""
NAMES = ("http_proxy", "https_proxy", "all_proxy")


def is_loopback(host: str) -> bool:
    """Whether `host` (a name, or an address with or without brackets) is this machine.

    *Example*: `localhost`, `a.localhost`, `127.1.2.3`, `::1`, `::ffff:127.0.0.1` and `0.0.0.0`.
    """
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None) or address
    return bool(mapped.is_loopback or mapped.is_unspecified)


def bypass_loopback() -> None:
    """Add this machine's addresses to `NO_PROXY`, which our child processes and libraries read."""
    if next(_proxies(), None) is None:
        return
    for name in ("no_proxy", "NO_PROXY"):
        # Libraries read either; the lower-case one first, so that it must not hide the other.
        given = os.environ.get(name) or os.environ.get(name.swapcase(), "")
        listed = [entry.strip() for entry in given.split(",") if entry.strip()]
        if "*" not in listed:
            listed += [host for host in LOCAL if host not in listed]
            os.environ[name] = ",".join(listed)


def client_settings(url: str = "") -> dict[str, Any]:
    """Return httpx's settings of a client for `url` (empty: for any).

    Raises ConfigError naming the variable if the environment has a proxy that cannot be used.
    """
    import httpx  # noqa: PLC0415 - a third of a second, which a command's --help need not wait

    try:
        host = httpx.URL(url).host
    except httpx.InvalidURL:  # reported by the request, with the address
        host = ""
    if url and is_loopback(host):
        # Without httpx's reading of the environment, which also names the trusted certificates.
        is_secure = httpx.URL(url).scheme == "https"
        return {"trust_env": False} | ({"verify": httpx.create_ssl_context()} if is_secure else {})
    check_proxies()
    return {}


def check_proxies() -> None:
    """Raise ConfigError naming the variable if it does not hold a proxy's address."""
    import httpx  # noqa: PLC0415 - as above

    for name, value in _proxies():
        try:
            proxy = httpx.URL(value if "://" in value else f"http://{value}")
            is_valid = proxy.scheme in SCHEMES and bool(proxy.host)
        except httpx.InvalidURL:
            is_valid = False
        if not is_valid:
            expected = f"the address of a proxy ({', '.join(SCHEMES)})"
            fix = f"export {name}=socks5://HOST:PORT or http://HOST:PORT, or unset {name}"
            raise ConfigError(explain(name, value.rpartition("@")[2], expected, fix))


def _proxies() -> Iterator[tuple[str, str]]:
    """Yield the variables that name a proxy; the lower-case name wins, as in curl and Python."""
    for lower in NAMES:
        for name in (lower, lower.upper()):
            if os.environ.get(name):
                yield name, os.environ[name]
                break
