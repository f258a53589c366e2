"""Bearer tokens: read from the environment, and compared with a request's header."""

import hmac
import os

from verl.errors import ConfigError


class TokenError(ConfigError, ValueError):
    """A token that no header can hold."""


def read_token(variable: str, token: str | None = None) -> str | None:
    """Return the token, or else that of the environment, None if empty. Raises TokenError."""
    token = os.environ.get(variable) if token is None else token
    if token and not (token.isascii() and token.isprintable() and " " not in token):
        raise TokenError(
            f"{variable} (not shown) has spaces or characters that a header cannot hold; "
            "expected printable ASCII"
        )
    return token or None


def has_token(header: str, token: str) -> bool:
    """Whether an `Authorization` header, which Starlette decodes as Latin-1, holds the token."""
    scheme, _, value = header.strip().partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(
        value.strip().encode("latin-1"), token.encode()
    )
