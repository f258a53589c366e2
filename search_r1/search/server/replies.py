"""One JSON answer, sent without a framework's overhead."""

from collections.abc import Mapping

from starlette.types import Send


async def reply(send: Send, status: int, body: bytes, headers: Mapping[str, str]) -> None:
    """Send a whole answer."""
    length = str(len(body)).encode()
    lines = [(b"content-type", b"application/json"), (b"content-length", length)]
    lines += [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": body})
