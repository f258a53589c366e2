"""Client of a search service, with a rate limit and retries after transient failures.

The API key is read from the environment and redacted in all log lines and errors.
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

from search_r1.online.exchange import BoundedHttpClient, Response
from search_r1.online.ledger import open_ledger
from search_r1.online.services import (
    Credentials,
    HttpRequest,
    Json,
    SearchRequest,
    SearchResult,
    SearchService,
)
from search_r1.retrieval.errors import (
    SetupError,
    UpstreamInvalid,
    UpstreamRefused,
    UpstreamUnavailable,
)
from search_r1.retrieval.settings import OnlineConfig
from search_r1.retrying import Backoff, TransientError, call_with_retries, parse_retry_after

logger = logging.getLogger(__name__)

URL_LOGGERS = ("httpx", "httpcore.connection", "httpcore.http11", "httpcore.http2",
               "httpcore.proxy")  # fmt: skip
"""Loggers that write URLs or headers; the keys of Google and SerpAPI are part of the URL."""

_secrets: set[str] = set()
MAX_ANSWER_BYTES = 8 << 20
MAX_RETRY_AFTER_S = 60.0
"""A longer Retry-After is reported as an outage; the caller decides when to search again."""
MAX_ERROR_BYTES = 100_000
"""Maximum number of bytes of an error answer that are parsed."""
MAX_MESSAGE_CHARS = 300
BACKOFF = Backoff(0.5, 30.0)
PARSE_ERRORS = (ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError)
"""Errors raised when an answer does not have the documented form."""


def read_credentials(service: SearchService) -> Credentials:
    """Read the key and setting of a service; raises SetupError for a missing variable."""
    credentials = Credentials(*(_read_variable(service, name) for name in service.variables))
    keep_secret(credentials.key)
    for name in URL_LOGGERS:
        logging.getLogger(name).addFilter(_redact_record)  # no effect if added before
    return credentials


def keep_secret(key: str) -> None:
    """Let `redact` replace a key, also as it stands in URLs and JSON."""
    _secrets.update((key, quote(key), quote_plus(key), key.replace("/", r"\/")))


def redact(text: str) -> str:
    """Replace every key that has been read by stars."""
    for secret in sorted(_secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def _read_variable(service: SearchService, variable: str) -> str:
    value = os.environ.get(variable, "").strip()
    if not value:
        raise SetupError(
            f"--retriever_name {service.name} without the environment variable {variable}; "
            f"it needs {' and '.join(service.variables)}: export the values from its account page"
        )
    if not all("!" <= character <= "~" for character in value):
        raise SetupError(
            f"the value of {variable} has spaces or characters outside ASCII, which no key of "
            f"{service.name} has; set it again, without quotes and line breaks"
        )
    return value


def _redact_record(record: logging.LogRecord) -> bool:
    """Redact the keys in a log record; a filter that rejects no record."""
    record.msg, record.args = redact(record.getMessage()), ()
    return True


class RateLimit:
    """A token bucket that holds one token, so that the requests of threads are evenly spaced."""

    def __init__(
        self,
        per_second: float,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._interval = 1 / per_second
        self._now = now
        self._sleep = sleep
        self._next = now()  # time of the next request
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Wait until a request may be sent; one caller returns per interval."""
        while True:
            with self._lock:
                delay = self._next - self._now()
                if delay <= 0:
                    self._next = self._now() + self._interval
                    return
            self._sleep(delay)

    def pause(self, seconds: float) -> None:
        """Send no requests for `seconds`; also delays callers that are waiting."""
        with self._lock:
            self._next = max(self._next, self._now() + seconds)


class _InvalidAnswer(TransientError):
    """An answer that does not have the documented form."""


class Upstream:
    """A client of one service; safe to use from several threads."""

    def __init__(
        self,
        service: SearchService,
        credentials: Credentials,
        config: OnlineConfig,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Raises SetupError for an invalid --online_url."""
        self.service = service
        self.url = check_url(config.online_url or service.url)
        self.setting = credentials.setting
        self._credentials = credentials
        self._retries = config.online_retries
        self._sleep = sleep
        self._limit = RateLimit(config.requests_per_second, sleep=sleep)
        self._ledger = open_ledger(config)
        self._client = BoundedHttpClient(config.online_timeout, MAX_ANSWER_BYTES)

    def search(self, request: SearchRequest) -> list[SearchResult]:
        """Send a request, with retries, and return its results.

        Raises UpstreamRefused at once, UpstreamUnavailable or UpstreamInvalid after all retries.
        """
        http_request = self.service.build(self._credentials, request)
        try:
            return call_with_retries(
                lambda: self._attempt(http_request, request), self._retries, BACKOFF, self._sleep
            )
        except TransientError as error:
            is_invalid = isinstance(error, _InvalidAnswer)
            raise (UpstreamInvalid if is_invalid else UpstreamUnavailable)(
                f"{self.service.name} did not answer in {self._retries + 1} tries; last error: "
                f"{error}; try later, or lower --requests_per_second"
            ) from error

    def close(self) -> None:
        self._client.close()
        if self._ledger is not None:
            self._ledger.close()

    def _attempt(self, request: HttpRequest, search: SearchRequest) -> list[SearchResult]:
        """Send a request once; raises TransientError, UpstreamUnavailable or UpstreamRefused."""
        self._limit.wait()
        if self._ledger is not None:
            self._ledger.spend()
        method = "GET" if request.body is None else "POST"
        fields: dict[str, Any] = {"params": request.params or None, "headers": request.headers}
        try:
            response = self._client.send(method, self.url, json=request.body, **fields)
        except httpx.HTTPError as error:  # `from None`: the URL in the error may contain the key
            raise TransientError(redact(f"{type(error).__name__} {error}")) from None
        except ValueError as error:
            raise _InvalidAnswer(f"an answer outside its documented form ({error})") from None
        if response.status != 200:
            raise self._error_of(response)
        try:
            answer = json.loads(response.body)
            results = self.service.read(answer)
            if search.with_box and self.service.read_box is not None:
                return [*self.service.read_box(answer), *results]
            return results
        except PARSE_ERRORS as error:
            got = redact(response.body[:MAX_ERROR_BYTES].decode("utf-8", "replace"))[:80]
            reason = redact(f"{type(error).__name__}: {error}")[:MAX_MESSAGE_CHARS]
            raise _InvalidAnswer(
                f"an answer outside its documented form ({reason}; got {got!r})"
            ) from None

    def _error_of(self, response: Response) -> Exception:
        """Return the error to raise for a status other than 200; obeys `Retry-After`."""
        status = response.status
        text = response.body[:MAX_ERROR_BYTES].decode("utf-8", "replace")
        is_transient = (
            status in (408, 425, 429) or status >= 500 or self.service.rate_limited.search(text)
        )
        message = f"{status}: {_message(text)}"
        if not is_transient or self.service.quota_exhausted.search(text):
            return UpstreamRefused(
                f"{self.service.name} refused with {message}; check the key in "
                f"{' and '.join(self.service.variables)} and the rest of its quota"
            )
        retry_after = parse_retry_after(response.headers)
        if retry_after > MAX_RETRY_AFTER_S:
            return UpstreamUnavailable(
                f"{self.service.name} asks to come back in {retry_after:.0f} s, with {message}"
            )
        self._limit.pause(retry_after)
        return TransientError(message)


def check_url(url: str, flag: str = "--online_url") -> str:
    """Return the address that a flag gives; raises SetupError if no request may go there."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise SetupError(f"{flag} {url!r} is not an address: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise SetupError(f"{flag} {url!r}; expected an address with http:// or https://")
    if parsed.userinfo or parsed.query:
        raise SetupError(f"{flag} has a password or parameters; give keys in the environment only")
    if parsed.scheme == "http" and parsed.host not in ("127.0.0.1", "::1", "localhost"):
        logger.warning("%s does not use https: the key is sent unencrypted", flag)
    return url


def _message(body: str) -> str:
    """Return the message of an error answer from the usual JSON fields, with keys redacted."""
    try:
        message: Json = json.loads(body)
    except (ValueError, RecursionError):
        message = body
    while isinstance(message, dict):
        fields = [message[name] for name in ("error", "detail", "message") if message.get(name)]
        message = fields[0] if fields else str(message)
    return redact(" ".join(str(message).split()))[:MAX_MESSAGE_CHARS] or "no message"
