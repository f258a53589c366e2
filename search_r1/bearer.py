"""Bearer token authentication."""

import hmac


def has_token(header: str, token: str) -> bool:
    """Whether an `Authorization` header holds this bearer token; compares in constant time.

    The scheme may have any case. Starlette decodes headers as Latin-1, so `header` has that form.
    """
    scheme, _, value = header.strip().partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(
        value.strip().encode("latin-1"), token.encode()
    )
