"""Whether a request carries the bearer token of a server."""

import hmac


def has_token(header: str, token: str) -> bool:
    """Whether the value of `Authorization` is `token`'s; compared in constant time.

    The scheme's name may be written in any case. `header` is as Starlette gives it, in Latin-1.
    """
    scheme, _, given = header.strip().partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(
        given.strip().encode("latin-1"), token.encode()
    )
