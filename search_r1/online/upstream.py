"""Asking a service: one request at a time within its rate, again after what may pass.

Its key is read from the environment, and kept out of every log line and error.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, quote_plus

import httpx

from search_r1.exchange import BoundedHttpClient, Response
from search_r1.online.services import (
    Credentials,
    HttpRequest,
    Json,
    SearchRequest,
    SearchResult,
    Service,
)
from search_r1.retrying import Backoff, TransientError, call_with_retries, parse_retry_after
from search_r1.search.errors import (
    SetupError,
    UpstreamInvalid,
    UpstreamRefused,
    UpstreamUnavailable,
)
from search_r1.search.settings import OnlineConfig

logger = logging.getLogger(__name__)

CHATTY = ("httpx", "httpcore.connection", "httpcore.http11", "httpcore.http2", "httpcore.proxy")
"""Loggers that write addresses or headers; Google's and SerpAPI's keys are part of an address."""

_secrets: set[str] = set()
MOST_BYTES = 8 << 20
LONGEST_WAIT_S = 60.0
"""A Retry-After above it is an outage for the caller, who decides when to come back."""
MOST_READ = 100_000
"""Bytes of an error answer that are looked at."""
MOST_MESSAGE = 300
PAUSES = Backoff(0.5, 30.0)
GARBAGE = (ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError)
"""What reading an answer of another form raises."""


def read_credentials(service: Service) -> Credentials:
    """The service's key and setting; raises SetupError naming the variable to set."""
    credentials = Credentials(*(_read(service, variable) for variable in service.variables))
    key = credentials.key
    _secrets.update((key, quote(key), quote_plus(key), key.replace("/", r"\/")))  # URLs and JSON
    for name in CHATTY:
        logging.getLogger(name).addFilter(_hide_record)  # adding one twice is adding it once
    return credentials


def hide(text: str) -> str:
    """`text` with every key that was read replaced by stars."""
    for secret in sorted(_secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def _read(service: Service, variable: str) -> str:
    value = os.environ.get(variable, "").strip()
    if not value:
        raise SetupError(
            f"--retriever_name {service.name} without the environment variable {variable}; "
            f"it needs {' and '.join(service.variables)}: export what its account page shows"
        )
    if not all("!" <= character <= "~" for character in value):
        raise SetupError(
            f"the value of {variable} has spaces or characters outside ASCII, which no key of "
            f"{service.name} has; set it again, without quotes and line breaks"
        )
    return value


def _hide_record(record: logging.LogRecord) -> bool:
    """A log filter that lets every record pass, without keys."""
    record.msg, record.args = hide(record.getMessage()), ()
    return True


class RateLimit:
    """A token bucket that holds one token, shared by threads: requests are evenly spaced."""

    def __init__(
        self,
        per_second: float,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._interval = 1 / per_second
        self._now = now
        self._sleep = sleep
        self._next = now()
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Return when a request may be sent; only one caller returns per interval."""
        while True:
            with self._lock:
                pause = self._next - self._now()
                if pause <= 0:
                    self._next = self._now() + self._interval
                    return
            self._sleep(pause)

    def hold(self, seconds: float) -> None:
        """Let nobody send for `seconds`, also those who wait already."""
        with self._lock:
            self._next = max(self._next, self._now() + seconds)


class _Garbage(TransientError):
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
        self._exchanges = BoundedHttpClient(config.online_timeout, MOST_BYTES)

    def ask(self, ask: SearchRequest) -> list[SearchResult]:
        """The results of one request.

        Raises UpstreamUnavailable after all retries (UpstreamInvalid, where the last answer was no
        documented one) and UpstreamRefused at once for a refusal.
        """
        call = self.service.build(self._credentials, ask)
        try:
            return call_with_retries(lambda: self._try(call), self._retries, PAUSES, self._sleep)
        except TransientError as error:
            kind = UpstreamInvalid if isinstance(error, _Garbage) else UpstreamUnavailable
            raise kind(
                f"{self.service.name} did not answer in {self._retries + 1} tries; the last: "
                f"{error}; try later, or lower --requests_per_second"
            ) from error

    def close(self) -> None:
        """Close the connections."""
        self._exchanges.close()

    def _try(self, call: HttpRequest) -> list[SearchResult]:
        """One request; raises TransientError, UpstreamUnavailable or UpstreamRefused."""
        self._limit.wait()
        method = "GET" if call.body is None else "POST"
        fields: dict[str, Any] = {"params": call.params or None, "headers": call.headers}
        try:
            answer = self._exchanges.send(method, self.url, json=call.body, **fields)
        except httpx.HTTPError as error:  # `from None`: its address may hold the key
            raise TransientError(hide(f"{type(error).__name__} {error}")) from None
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

    def _judge(self, answer: Response) -> Exception:
        """What an answer other than 200 means for the next try."""
        status, said = answer.status, answer.body[:MOST_READ].decode("utf-8", "replace")
        limited = status in (408, 425, 429) or status >= 500 or self.service.busy.search(said)
        message = f"{status}: {_message(said)}"
        if not limited or self.service.spent.search(said):
            return UpstreamRefused(
                f"{self.service.name} refused with {message}; check the key in "
                f"{' and '.join(self.service.variables)} and what is left of its quota"
            )
        after = parse_retry_after(answer.headers)
        if after > LONGEST_WAIT_S:
            return UpstreamUnavailable(
                f"{self.service.name} asks to come back in {after:.0f} s, with {message}"
            )
        self._limit.hold(after)
        return TransientError(message)


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
