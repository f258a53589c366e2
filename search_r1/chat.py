"""One message to a chat model, and its reply, through the openai client.

Some models want `max_completion_tokens` instead of `max_tokens`, or no other temperature than their
own. A server says so with status 400 and the name of the field; the request is then sent again
without it. Fields that the user gave in `body` are never changed.
"""

import json
import logging
import re
import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import httpx
import openai

from search_r1.retrying import TransientError, parse_retry_after
from verl.proxies import client_settings

logger = logging.getLogger(__name__)

TRANSIENT = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
"""HTTP statuses after which a retry may succeed."""
REFUSED = (400, 422)
"""HTTP statuses of a request with a field that the server does not take."""
FROM_ENVIRONMENT = ("OpenAI-Organization", "OpenAI-Project")
"""Headers that the client would send for another service's variables."""
_TEMPERATURE = re.compile("[`'\"]temperature[`'\"]")
"""The field in a message, in quotes; without them a message may speak of the question."""


class ChatOptions(Protocol):
    """Which model is asked, and how."""

    @property
    def url(self) -> str:
        """Address of the server, as http://HOST/v1."""

    @property
    def model(self) -> str: ...

    @property
    def api_key(self) -> str | None: ...

    @property
    def timeout(self) -> float:
        """Seconds for one request."""

    @property
    def max_tokens(self) -> int: ...

    @property
    def max_concurrency(self) -> int:
        """Largest number of requests at once."""

    @property
    def body(self) -> Mapping[str, Any]:
        """Fields of the request that replace those of `ChatEndpoint`; None removes a field."""


@dataclass(frozen=True)
class Completion:
    """What the model wrote."""

    text: str
    is_cut: bool
    """It ended at the limit of tokens."""


class ChatRefused(Exception):
    """The server refuses the request, or answers it for good with an error."""

    def __init__(self, problem: str, status: int) -> None:
        super().__init__(problem)
        self.is_about_fields = status in REFUSED


class ChatEndpoint:
    """An OpenAI-compatible chat endpoint, usable from any thread."""

    def __init__(self, options: ChatOptions, name: str) -> None:
        """Read the certificates; it connects with the first request. Raises ValueError.

        `name` says in messages what the endpoint is for, as "judge".
        """
        self._options, self._name = options, name
        names = FROM_ENVIRONMENT if options.api_key else (*FROM_ENVIRONMENT, "Authorization")
        try:
            # A redirect would send the key to another host.
            settings = {"follow_redirects": False, **client_settings(str(httpx.URL(options.url)))}
        except httpx.InvalidURL as error:
            raise ValueError(f"{name}.url: got {options.url} ({error})") from error
        self._client = openai.OpenAI(
            api_key=options.api_key or "none", base_url=options.url, timeout=options.timeout,
            max_retries=0, http_client=openai.DefaultHttpxClient(**settings),
        )  # fmt: skip
        self._headers: Any = {"headers": dict.fromkeys(names, openai.Omit())}
        weakref.finalize(self, self._client.close)
        # The time that a request waits for another's is no part of its timeout.
        self._slots = threading.Semaphore(options.max_concurrency)
        self._changes: dict[str, Any] = {}
        self._lock = threading.Lock()

    def ask(self, message: str) -> Completion:
        """Send one request. Raises TransientError, or ChatRefused if a retry cannot help."""
        fields = self.fields(message)
        try:
            with self._slots:
                answer = self._client.post(
                    "/chat/completions", cast_to=str, body=fields, options=self._headers
                )
        except openai.APIConnectionError as error:
            raise TransientError(f"{type(error).__name__} {error.__cause__ or error}") from error
        except openai.APIStatusError as error:
            status, text = error.status_code, error.response.text
            if status in TRANSIENT:
                wait = parse_retry_after(error.response.headers)
                raise TransientError(f"status {status}", wait) from error
            if status in REFUSED and self._adapt(fields, error):
                return self.ask(message)  # at most once for each field that can be changed
            problem = f"{self._options.url}: status {status}: {text[:200]}"
            raise ChatRefused(problem, status) from error
        try:
            choice = json.loads(answer)["choices"][0]
            text = choice["message"]["content"] or ""
            if not isinstance(text, str):
                raise TypeError("its content is no text")
            return Completion(text, choice.get("finish_reason") == "length")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise TransientError(f"no chat completion: {answer[:200]}") from error

    def fields(self, message: str) -> dict[str, Any]:
        """Return the body for one message; fields that are None are left out."""
        fields = {
            "model": self._options.model,
            "messages": [{"role": "user", "content": message}],
            "temperature": 0,
            "max_tokens": self._options.max_tokens,
            **self._changes,
            **self._options.body,
        }
        return {name: value for name, value in fields.items() if value is not None}

    def _adapt(self, sent: Mapping[str, Any], error: openai.APIStatusError) -> bool:
        """Whether the request can be sent again: change the field that the answer to it refuses."""
        changes = dict(self._wanted(sent, error))
        with self._lock:
            is_new = not changes.keys() <= self._changes.keys()
            self._changes = {**self._changes, **changes}
        if is_new:
            logger.warning("the %s refuses a field of our requests; from now on they have %s",
                           self._name, json.dumps(changes))  # fmt: skip
        return bool(changes)

    def _wanted(
        self, sent: Mapping[str, Any], error: openai.APIStatusError
    ) -> Iterator[tuple[str, Any]]:
        """Yield the changes that an error asks for, of fields that are ours."""
        body = error.body
        text = str(body.get("message")) if isinstance(body, Mapping) else error.response.text
        ours, other = sent.keys() - self._options.body.keys(), "max_completion_tokens"
        if "max_tokens" in ours and other not in self._options.body and (
            error.param == "max_tokens" or other in text
        ):  # fmt: skip
            yield from (("max_tokens", None), (other, sent["max_tokens"]))
        elif "temperature" in ours and (error.param == "temperature" or _TEMPERATURE.search(text)):
            yield "temperature", None
