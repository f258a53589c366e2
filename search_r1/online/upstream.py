"""Asking a service: one request at a time within its rate, again after what may pass."""

import json
import logging
import time
from collections.abc import Callable
from typing import Any

import httpx

from search_r1.exchange import Answer, Exchanges
from search_r1.online.keys import hide
from search_r1.online.limits import RateLimit
from search_r1.online.service import Ask, Call, Credentials, Found, Json, Service
from search_r1.retrying import Pauses, Transient, retry_after, try_again
from search_r1.search.backends.settings import OnlineConfig
from search_r1.search.errors import (
    SetupError,
    UpstreamInvalid,
    UpstreamRefused,
    UpstreamUnavailable,
)

logger = logging.getLogger(__name__)

MOST_BYTES = 8 << 20
LONGEST_WAIT_S = 60.0
"""A Retry-After above it is an outage for the caller, who decides when to come back."""
MOST_READ = 100_000
"""Bytes of an error answer that are looked at."""
MOST_MESSAGE = 300
PAUSES = Pauses(0.5, 30.0)
GARBAGE = (ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError)
"""What reading an answer of another form raises."""


class _Garbage(Transient):
    """An answer outside the documented form."""


class Upstream:
    """One service; safe to use from several threads."""

    def __init__(
        self,
        service: Service,
        credentials: Credentials,
        config: OnlineConfig,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Raises SetupError for an address that is none."""
        self.service = service
        self.url = _check_url(config.online_url or service.url)
        self.setting = credentials.setting
        self._credentials = credentials
        self._retries = config.online_retries
        self._sleep = sleep
        self._limit = RateLimit(config.requests_per_second, sleep=sleep)
        self._exchanges = Exchanges(config.online_timeout, MOST_BYTES)

    def ask(self, ask: Ask) -> list[Found]:
        """The results of one request.

        Raises UpstreamUnavailable after all retries (UpstreamInvalid, where the last answer was no
        documented one) and UpstreamRefused at once for a refusal.
        """
        call = self.service.build(self._credentials, ask)
        try:
            return try_again(lambda: self._try(call), self._retries, PAUSES, self._sleep)
        except Transient as error:
            kind = UpstreamInvalid if isinstance(error, _Garbage) else UpstreamUnavailable
            raise kind(
                f"{self.service.name} did not answer in {self._retries + 1} tries; the last: "
                f"{error}; try later, or lower --requests_per_second"
            ) from error

    def close(self) -> None:
        """Close the connections."""
        self._exchanges.close()

    def _try(self, call: Call) -> list[Found]:
        """One request; raises Transient, UpstreamUnavailable or UpstreamRefused."""
        self._limit.wait()
        method = "GET" if call.body is None else "POST"
        fields: dict[str, Any] = {"params": call.params or None, "headers": call.headers}
        try:
            answer = self._exchanges.send(method, self.url, json=call.body, **fields)
        except httpx.HTTPError as error:  # `from None`: its address may hold the key
            raise Transient(hide(f"{type(error).__name__} {error}")) from None
        except ValueError as error:
            raise _Garbage(f"an answer outside its documented form ({error})") from None
        if answer.status != 200:
            raise self._judge(answer)
        try:
            return self.service.read(json.loads(answer.body))
        except GARBAGE as error:
            got = hide(answer.body[:MOST_READ].decode("utf-8", "replace"))[:80]
            said = hide(f"{type(error).__name__}: {error}")[:MOST_MESSAGE]
            said = f"an answer outside its documented form ({said}; got {got!r})"
            raise _Garbage(said) from None

    def _judge(self, answer: Answer) -> Exception:
        """What an answer other than 200 means for the next try."""
        status, said = answer.status, answer.body[:MOST_READ].decode("utf-8", "replace")
        limited = status in (408, 425, 429) or status >= 500 or self.service.busy.search(said)
        message = f"{status}: {_message(said)}"
        if not limited or self.service.spent.search(said):
            return UpstreamRefused(
                f"{self.service.name} refused with {message}; check the key in "
                f"{' and '.join(self.service.variables)} and what is left of its quota"
            )
        after = retry_after(answer.headers)
        if after > LONGEST_WAIT_S:
            return UpstreamUnavailable(
                f"{self.service.name} asks to come back in {after:.0f} s, with {message}"
            )
        self._limit.hold(after)
        return Transient(message)


def _check_url(url: str) -> str:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise SetupError(f"--online_url {url!r} is no address: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise SetupError(f"--online_url {url!r}; expected an address with http:// or https://")
    if parsed.userinfo or parsed.query:
        raise SetupError(
            "--online_url has a password or parameters; keys come from the environment only"
        )
    if parsed.scheme == "http" and parsed.host not in ("127.0.0.1", "::1", "localhost"):
        logger.warning("--online_url has no https: the key travels in clear text")
    return url


def _message(body: str) -> str:
    """The words inside an error answer, whichever of the usual fields they are in; no key."""
    try:
        found: Json = json.loads(body)
    except (ValueError, RecursionError):
        found = body
    while isinstance(found, dict):
        found = next((found[n] for n in ("error", "detail", "message") if found.get(n)), str(found))
    return hide(" ".join(str(found).split()))[:MOST_MESSAGE] or "no message"
