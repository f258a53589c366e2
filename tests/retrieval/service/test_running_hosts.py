"""Which host names a server accepts, bound to this machine only or to a network."""

import asyncio

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp

from search_r1.retrieval.service.requests import misdirected
from search_r1.retrieval.service.running import with_host_check

OWN = ["localhost", "LOCALHOST:8000", "a.localhost", "localhost.", "127.0.0.1", "127.9.9.9:80",
       "[::1]:8000", "::1", "192.168.1.5:8000", "0.0.0.0"]  # fmt: skip
OTHERS = ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example",
          "notlocalhost", "2130706433", "0x7f.1", "", ":8000", "[evil]", "a" * 5000, "\x1b[2J",
          "localhost@evil.example", "localhost/evil", "user:pw@evil", "[", "é"]  # fmt: skip


def status(address: str, allowed: tuple[str, ...], *hosts: str | None) -> int:
    app: ASGIApp = PlainTextResponse("here")
    guarded = with_host_check(app, address, allowed, misdirected)
    headers = [(b"host", host.encode("latin-1")) for host in hosts if host is not None]

    async def main() -> httpx.Response:
        sent: list[int] = []

        async def send(message: object) -> None:
            sent.append(message.get("status", 0))  # type: ignore[attr-defined]

        await guarded({"type": "http", "headers": headers}, None, send)  # type: ignore[arg-type, typeddict-item]
        return httpx.Response(sent[0])

    return asyncio.run(main()).status_code


@pytest.mark.parametrize("host", [*OWN, None])
@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "127.0.0.2"])
def test_addresses_and_localhost_are_accepted(address: str, host: str | None) -> None:
    """Addresses work, for example with curl; a client without a Host header is not a browser."""
    assert status(address, (), host) == 200


@pytest.mark.parametrize("host", OTHERS)
def test_other_names_are_refused_on_loopback(host: str) -> None:
    """They are refused even beside a valid one; a server bound to a network accepts them."""
    assert status("127.0.0.1", (), host) == status("::1", (), host) == 421
    assert status("127.0.0.1", (), "localhost", host) == 421
    assert status("0.0.0.0", (), host) == status("10.0.0.5", (), host) == 200


def test_allowed_names() -> None:
    """They are accepted with any port and case, and restrict a server on a network as well."""
    for address in ("127.0.0.1", "0.0.0.0"):
        assert status(address, ("Node17", "b.example"), "node17:8000") == 200
        assert status(address, ("Node17", "b.example"), "10.0.0.5:8000") == 200
        assert status(address, ("Node17",), "node18") == 421
        assert status(address, ("*",), "node18") == 200
