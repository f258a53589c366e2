"""Proxies of the environment, with a SOCKS5 proxy on this machine."""

import asyncio
import os
import urllib.request

import httpx
import pytest
from fastapi import FastAPI

from search_r1.online.exchange import BoundedHttpClient
from tests.apps import running
from tests.fakes import ByteTokenizer
from tests.socks import socks_proxy
from verl.errors import ConfigError
from verl.ext.engines.remote import RemoteEngine
from verl.proxies import NAMES, bypass_loopback, check_proxies, client_settings, is_loopback
from verl.types import Sampling

ALL = [*NAMES, *map(str.upper, NAMES), "no_proxy", "NO_PROXY"]


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ALL:
        monkeypatch.setenv(name, "")  # so that what a test sets is removed as well
        monkeypatch.delenv(name)


def completions() -> FastAPI:
    app = FastAPI()

    @app.post("/v1/completions")
    def complete() -> object:
        return {"choices": [{"text": "x", "token_ids": [7], "finish_reason": "stop"}]}

    return app


@pytest.mark.parametrize("name", ["ALL_PROXY", "all_proxy", "HTTP_PROXY", "http_proxy"])
def test_a_socks_proxy_is_used_for_other_hosts_only(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Name resolution is the proxy's as well; a server on this machine is asked directly."""
    with running(completions()) as url, socks_proxy(httpx.URL(url).port or 0) as (proxy, asked):
        monkeypatch.setenv(name, f"socks5h://{proxy}")
        for address in ("http://engine.example:80", url):

            async def ask(address: str = address) -> list[int]:
                engine = RemoteEngine(address, "m", ByteTokenizer())
                try:
                    return list((await engine.generate([1], Sampling(1))).ids)
                finally:
                    await engine.shutdown()

            assert asyncio.run(ask()) == [7]
        assert asked == ["engine.example:80"]
        client = BoundedHttpClient(20, 1000, url=url)  # a web service's
        assert client.send("POST", f"{url}/v1/completions").status == 200
        client.close()
        assert len(asked) == 1


@pytest.mark.parametrize(
    "value", ["socks4://h:1", "socks://h:1", "ftp://h", "http://h:port", "http://", "http://[::1"]
)
@pytest.mark.parametrize("name", ["ALL_PROXY", "https_proxy"])
def test_an_unusable_proxy_is_refused_by_the_name_of_its_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """It matters only where it would be used; its password is never printed."""
    monkeypatch.setenv(name, value.replace("//", "//ann:secret@") if "//h" in value else value)
    with pytest.raises(ConfigError, match=rf"^{name}: got ") as caught:
        client_settings("https://host")
    assert "secret" not in str(caught.value)
    assert client_settings("http://127.0.0.1:8000")["trust_env"] is False


@pytest.mark.parametrize("value", ["h:3128", "http://h:3128", "https://h", "socks5://u:p@h:1"])
def test_usable_proxies_are_accepted(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """An address without a scheme is one of HTTP, as everywhere; httpx accepts each of them."""
    monkeypatch.setenv("ALL_PROXY", value)
    check_proxies()
    httpx.Client(**client_settings("http://host")).close()


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST.", "a.localhost", "127.0.0.1", "127.9.8.7", "::1", "[::1]",
             "0.0.0.0", "::", "::ffff:127.0.0.1"],
)  # fmt: skip
def test_loopback_hosts(host: str) -> None:
    """Every form of this machine's own addresses is one."""
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["", "host", "localhost.org", "notlocalhost", "128.0.0.1", "::2"])
def test_other_hosts_are_not_loopback(host: str) -> None:
    """Names that only look like one are not."""
    assert not is_loopback(host)


@pytest.mark.parametrize("name", ["no_proxy", "NO_PROXY"])
def test_libraries_and_child_processes_bypass_the_proxy_too(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The user's own exceptions stay; without a proxy nothing is set."""
    monkeypatch.setenv(name, "corp.example")
    bypass_loopback()
    assert os.environ[name] == "corp.example"
    monkeypatch.setenv("ALL_PROXY", "socks5://h:1")
    bypass_loopback()
    bypass_loopback()
    expected = "corp.example,localhost,127.0.0.1,::1,0.0.0.0"
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == expected
    assert urllib.request.proxy_bypass("127.0.0.1:8000")
    assert urllib.request.proxy_bypass("corp.example")
    assert not urllib.request.proxy_bypass("example.org")
