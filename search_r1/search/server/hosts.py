"""Which names of this server a request may use.

A page of a browser can have its own name lead to this machine (DNS rebinding), and would then read
what is answered: its requests carry that name. Addresses and `localhost` cannot be made to lead
elsewhere.
"""

import functools
import ipaddress
from collections.abc import Callable, Collection

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

ANY = "*"
LOOPBACK = ("127.", "::1")


def checked(
    app: ASGIApp, address: str, allowed: Collection[str], refuse: Callable[[str], Response]
) -> ASGIApp:
    """`app` behind a look at `Host`, where it is bound to this machine alone or names are given.

    `address`: what it is bound to. `refuse`: the answer to a request for another name.
    """
    if ANY in allowed or not (allowed or address.startswith(LOOPBACK)):
        return app
    names = {name.lower().rstrip(".") for name in allowed}

    @functools.lru_cache(1024)
    def is_mine(host: bytes) -> bool:
        return serves(host.decode("latin-1"), names)

    async def check(scope: Scope, receive: Receive, send: Send) -> None:
        for name, host in scope.get("headers", ()):
            if name == b"host" and not is_mine(host):
                shown = ascii(host.decode("latin-1")[:100])
                text = f"this server has no name {shown}; its --allowed_hosts can give it one"
                await refuse(text)(scope, receive, send)
                return
        await app(scope, receive, send)

    return check


def serves(host: str, names: Collection[str]) -> bool:
    """Whether the value of `Host` is an address, `localhost`, or one of `names`, at any port."""
    name = host.strip().lower()
    if name.startswith("["):
        name = name[1:].partition("]")[0]
    elif name.count(":") < 2:
        name = name.partition(":")[0]
    name = name.rstrip(".")
    if name in names or name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return False
