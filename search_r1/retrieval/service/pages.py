"""Routes for a web page, whose files are read once; no request can open a path."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "object-src 'none'"
)
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes(files: Iterable[Path], servers: Sequence[str] = ()) -> list[Route]:
    """Return a route for each file (HTML: at `/`); the page may send requests to `servers`."""
    connect = f"; connect-src 'self' {' '.join(servers)}" if servers else ""
    headers = HEADERS | {"Content-Security-Policy": POLICY + connect}
    return [_route(file, headers) for file in files]


def _route(file: Path, headers: dict[str, str]) -> Route:
    content, media_type = file.read_bytes(), MEDIA_TYPES[file.suffix]

    async def show(request: Request) -> Response:
        return Response(content, media_type=media_type, headers=headers)

    path = "/" if file.suffix == ".html" else f"/{file.name}"
    return Route(path, show, methods=["GET"], include_in_schema=False)
