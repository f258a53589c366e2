"""The body of a request to the judge, adapted to what its server refuses.

Some models want `max_completion_tokens` instead of `max_tokens`, or no other temperature than their
own. A server says so with status 400 and the name of the field; the request is then sent again
without it. Fields that the user gave in `judge.body` are never changed.
"""

import json
import logging
import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from search_r1.rewards.judge.options import JudgeOptions

logger = logging.getLogger(__name__)

_NAMED = re.compile("[`'\"]temperature[`'\"]")
"""The field in a message, in quotes; without them a message may speak of the question."""
REFUSED = (400, 422)
"""HTTP statuses of a request with a field that the server does not take."""


class RequestBody:
    """The fields of every request of a run; safe to use from several threads."""

    def __init__(self, options: JudgeOptions) -> None:
        self._options = options
        self._changes: dict[str, Any] = {}
        self._lock = threading.Lock()

    def fields(self, message: str) -> dict[str, Any]:
        """Return the body for one message; fields that are None are left out."""
        with self._lock:
            fields = {
                "model": self._options.model,
                "messages": [{"role": "user", "content": message}],
                "temperature": 0,
                "max_tokens": self._options.max_tokens,
                **self._changes,
                **self._options.body,
            }
        return {name: value for name, value in fields.items() if value is not None}

    def adapt(self, sent: Mapping[str, Any], answer: str) -> bool:
        """Whether the request can be sent again: change the field that the answer to it refuses."""
        changes = dict(self._wanted(sent, answer))
        with self._lock:
            is_new = not changes.keys() <= self._changes.keys()
            self._changes |= changes
        if is_new:
            logger.warning("the judge refuses a field of our requests; from now on they have %s",
                           json.dumps(changes))  # fmt: skip
        return bool(changes)

    def _wanted(self, sent: Mapping[str, Any], answer: str) -> Iterator[tuple[str, Any]]:
        """Yield the changes that an error message asks for, of fields that are ours."""
        param, text = _error_of(answer)
        ours = sent.keys() - self._options.body.keys()
        other = "max_completion_tokens"
        if "max_tokens" in ours and other not in self._options.body and (
            param == "max_tokens" or other in text
        ):  # fmt: skip
            yield from (("max_tokens", None), (other, sent["max_tokens"]))
        elif "temperature" in ours and (param == "temperature" or _NAMED.search(text)):
            yield "temperature", None


def _error_of(answer: str) -> tuple[str, str]:
    """Return the field that an error in OpenAI's form names, if any, and the message."""
    try:
        error = json.loads(answer)["error"]
        return str(error.get("param")), str(error.get("message"))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return "", answer
