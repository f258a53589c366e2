"""Host names that a server accepts, its port, and the limit of its connections."""

import asyncio
import errno
import resource
from typing import Any

import pytest
from starlette.responses import PlainTextResponse

from search_r1.retrieval.errors import SetupError
from search_r1.retrieval.service import running
from search_r1.retrieval.service.running import bind, configure, listen, with_host_check
from tests.retrieval.service.fake_backends import client


def status(address: str, allowed: tuple[str, ...], host: str) -> int:
    app: Any = with_host_check(PlainTextResponse("here"), address, allowed)

    async def main() -> int:
        async with client(app) as http:
            return (await http.get("/", headers={"Host": host})).status_code

    return asyncio.run(main())


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:80", "[::1]:8000"])
@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "127.0.0.2"])
def test_this_machine_is_accepted(address: str, host: str) -> None:
    """A server bound to this machine answers to its addresses and to localhost."""
    assert status(address, (), host) == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example:8000", "notlocalhost"])
def test_other_names_are_refused_on_loopback(host: str) -> None:
    """DNS rebinding is refused; a server bound to a network accepts every name."""
    assert status("127.0.0.1", (), host) == status("::1", (), host) == 400
    assert status("0.0.0.0", (), host) == status("10.0.0.5", (), host) == 200


def test_allowed_names() -> None:
    """They are accepted with any port and case, and restrict a server on a network as well."""
    for address in ("127.0.0.1", "10.0.0.5"):
        assert status(address, ("Node17", "b.example"), "node17:8000") == 200
        assert status(address, ("Node17",), f"{address}:8000") == 200
        assert status(address, ("Node17",), "node18") == 400
        assert status(address, ("*",), "node18") == 200


def test_the_limit_of_descriptors_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is raised as far as allowed, and some descriptors are kept for files."""
    limits_set: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: limits_set.append(limits))
    with bind("127.0.0.1", 0) as bound:
        for soft, hard, limit in [(1024, 4096, 4096), (512, -1, 65_536)]:
            monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft, hard=hard: (soft, hard))
            config = configure(PlainTextResponse("here"), bound, (), 1)
            assert config.limit_concurrency == limit - running.SPARE_DESCRIPTORS
    assert limits_set == [(4096, 4096), (65_536, -1)]


def test_a_machine_without_ipv6_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without IPv6 not even the socket can be created, which is an error with a fix."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    monkeypatch.setattr(running.socket, "socket", refuse)
    with pytest.raises(SetupError, match="--host"):
        bind("::1", 0)


def test_one_port_has_one_server() -> None:
    """Two servers can bind to it before either listens; the second to listen gets an error."""
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with bind("127.0.0.1", port) as second:
            assert listen(first) == f"127.0.0.1:{port}"
            with pytest.raises(SetupError, match="another --port"):
                listen(second)
