"""Pages for a browser: fixed files, read when an app is made; no request opens a path."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

KINDS = {
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
    """A route for each file under its name, for the HTML at `/`; `servers`: others that it asks."""
    more = f"; connect-src 'self' {' '.join(servers)}" if servers else ""
    return [_route(file, HEADERS | {"Content-Security-Policy": POLICY + more}) for file in files]


def _route(file: Path, headers: dict[str, str]) -> Route:
    content, kind = file.read_bytes(), KINDS[file.suffix]

    async def show(request: Request) -> Response:
        return Response(content, media_type=kind, headers=headers)

    path = "/" if file.suffix == ".html" else f"/{file.name}"
    return Route(path, show, methods=["GET"], include_in_schema=False)
