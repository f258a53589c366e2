"""Bearer token authentication."""

import hmac


def has_token(header: str, token: str) -> bool:
    """Whether an `Authorization` header, which Starlette decodes as Latin-1, holds the token."""
    scheme, _, value = header.strip().partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(
        value.strip().encode("latin-1"), token.encode()
    )
