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
PAGE_FILES = ("page.html", "page.css", "page.js", "passages.js", "requests.js", "study.js")
"""Files of the search page."""
SHARED = [Path(__file__).with_name(name) for name in ("look.css", "language.js", "logo.svg")]
"""Files that all pages have in common."""
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes(files: Iterable[Path], servers: Sequence[str] = ()) -> list[Route]:
    """Return a route for each file (HTML: at `/`) and each shared one.

    The page may send requests to `servers`.
    """
    connect = f"; connect-src 'self' {' '.join(servers)}" if servers else ""
    headers = HEADERS | {"Content-Security-Policy": POLICY + connect}
    return [_route(file, headers) for file in (*files, *SHARED)]


def _route(file: Path, headers: dict[str, str]) -> Route:
    async def show(request: Request) -> Response:
        return FileResponse(file, headers=headers)

    path = "/" if file.suffix == ".html" else f"/{file.name}"
    return Route(path, show, methods=["GET"], include_in_schema=False)
