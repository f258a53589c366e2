"""Routes for a web page; no request can open another path."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

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
    async def show(request: Request) -> Response:
        return FileResponse(file, headers=headers)

    path = "/" if file.suffix == ".html" else f"/{file.name}"
    return Route(path, show, methods=["GET"], include_in_schema=False)
