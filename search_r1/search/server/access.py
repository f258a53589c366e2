"""The bearer token: compared in constant time, wanted wherever searches or facts are given."""

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from search_r1.search.server.config import TOKEN_VARIABLE
from search_r1.search.server.replies import reply
from search_r1.search.server.statuses import Failure

GUARDED = frozenset({"/retrieve", "/info", "/metrics"})
"""Others only show that the server lives, its page, and what its contract is."""
REFUSAL = Failure(
    401,
    "a bearer token is needed: send `Authorization: Bearer TOKEN` with the value that the server "
    f"has in its environment variable {TOKEN_VARIABLE}",
    {"WWW-Authenticate": "Bearer"},
)


class Guard:
    """Lets requests with the token through to `app`."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        """`token` is compared byte by byte in UTF-8."""
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """401 for a guarded path without the token."""
        is_guarded = scope["type"] == "http" and scope["path"].rstrip("/") in GUARDED
        if is_guarded and not self._knows(scope):
            await reply(send, REFUSAL.status, REFUSAL.body, REFUSAL.headers)
            return
        await self._app(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        given = [v for name, v in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(_canonical(given[0]), self._expected)


def _canonical(header: bytes) -> bytes:
    """The scheme's name may be written in any case."""
    scheme, _, token = header.strip().partition(b" ")
    return scheme.title() + b" " + token.strip()
