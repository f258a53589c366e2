"""The search page: a fixed table of files read when the app is made; no request opens a path."""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).parent
FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.svg": ("page.svg", "image/svg+xml"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes() -> list[Route]:
    """A route for each file of the page that is there."""
    files = [(path, FOLDER / name, kind) for path, (name, kind) in FILES.items()]
    return [_route(path, file, kind) for path, file, kind in files if file.is_file()]


def _route(path: str, file: Path, kind: str) -> Route:
    content = file.read_bytes()

    async def show(request: Request) -> Response:
        return Response(content, media_type=kind, headers=HEADERS)

    return Route(path, show, methods=["GET"], include_in_schema=False)
