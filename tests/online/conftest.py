"""A scripted web server on 127.0.0.1, and the documented answers of all services."""

import json
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from search_r1.online.addresses import AddressPolicy
from search_r1.online.engine import OnlineRetriever, open_online
from search_r1.online.services import SERVICES
from search_r1.retrieval.settings import OnlineConfig

KEY = "k3y+of/tests=="
ENGINE_ID = "0123456789:engine"


@dataclass(frozen=True)
class ReceivedRequest:
    """A request that the server received."""

    method: str
    path: str
    params: dict[str, str]
    headers: dict[str, str]
    body: Any


@dataclass(frozen=True)
class Answer:
    """An answer of the server; `body` is sent as JSON unless it is bytes."""

    body: Any = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections that clients close early; show all other errors."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class Web:
    """A server that answers with the result of a function and records the requests."""

    def __init__(self, answer: Callable[[ReceivedRequest], Answer]) -> None:
        self.answer = answer
        self.requests: list[ReceivedRequest] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # else each answer waits 40 ms for an ACK

            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                size = int(self.headers.get("Content-Length", 0))
                body = json.loads(self.rfile.read(size)) if size else None
                params = dict(parse_qsl(parts.query))
                headers = dict(self.headers)
                request = ReceivedRequest(self.command, parts.path, params, headers, body)
                outer.requests.append(request)
                self.reply(outer.answer(request))

            do_POST = do_GET

            def reply(self, answer: Answer) -> None:
                is_raw = isinstance(answer.body, bytes)
                body = answer.body if is_raw else json.dumps(answer.body).encode()
                self.send_response(answer.status)
                for name, value in {"Content-Length": str(len(body)), **answer.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                try:
                    self.wfile.write(body)
                except OSError:
                    self.close_connection = True  # the client closed the connection

            def log_message(self, *args: Any) -> None:
                """Log nothing."""

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def stop(self) -> None:
        """Stop serving and close the port."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def web() -> Iterator[Callable[[Callable[[ReceivedRequest], Answer]], Web]]:
    """Yield a function that starts a scripted server, which stops with the test."""
    started: list[Web] = []

    def start(answer: Callable[[ReceivedRequest], Answer]) -> Web:
        started.append(Web(answer))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def reply() -> type[Answer]:
    """Return `Answer`, since tests do not import conftest."""
    return Answer


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a key for every service, and unset the proxies of this machine."""
    for service in SERVICES.values():
        for variable in service.variables:
            monkeypatch.setenv(variable, KEY if variable == service.key_variable else ENGINE_ID)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.fixture
def key() -> str:
    """Return the key that all services have in these tests."""
    return KEY


@dataclass(frozen=True)
class Documented:
    """The documented requests and answers of a service."""

    answer: Callable[[list[tuple[str, str, str]]], Any]
    """Returns the answer for a list of (url, title, snippet), also for an empty one."""
    authorised: Callable[[ReceivedRequest], bool]
    parse_request: Callable[[ReceivedRequest], tuple[str, int, int]]
    """Returns (query, count, 0-based offset of the first result)."""
    wrong_key: Answer
    quota_exhausted: Answer
    rate_limited: Answer


def _google(results: list[tuple[str, str, str]]) -> Any:
    total = {"searchTime": 0.2, "totalResults": str(len(results))}
    answer: dict[str, Any] = {"kind": "customsearch#search", "searchInformation": total}
    items = [
        {
            "kind": "customsearch#result",
            "title": title,
            "htmlTitle": f"<b>{title}</b>",
            "link": url,
            "displayLink": "example.org",
            "snippet": snippet,
        }
        for url, title, snippet in results
    ]
    return {**answer, "items": items} if items else answer


def _google_error(code: int, message: str, reason: str) -> Answer:
    errors = [{"message": message, "domain": "usageLimits", "reason": reason}]
    return Answer({"error": {"code": code, "message": message, "errors": errors}}, code)


def _serpapi(results: list[tuple[str, str, str]]) -> Any:
    answer: dict[str, Any] = {"search_metadata": {"status": "Success"}}
    if not results:
        return {**answer, "error": "Google hasn't returned any results for this query."}
    items = [
        {"position": i, "title": t, "link": u, "displayed_link": "example.org", "snippet": s}
        for i, (u, t, s) in enumerate(results, start=1)
    ]
    return {**answer, "organic_results": items}


def _brave(results: list[tuple[str, str, str]]) -> Any:
    answer: dict[str, Any] = {"type": "search", "query": {"original": "q"}}
    items = [
        {"type": "search_result", "title": t.replace("'", "&#x27;"), "url": u, "description": s}
        for u, t, s in results
    ]
    return {**answer, "web": {"type": "search", "results": items}} if items else answer


def _brave_error(status: int, code: str, detail: str) -> Answer:
    # The fields are those of an answer in github.com/egoist/chatwise-releases/issues/1296.
    meta = {"plan": "Free", "rate_limit": 1, "rate_current": 1, "quota_limit": 2000,
            "quota_current": 15, "component": "rate_limiter"}  # fmt: skip
    error = {"id": "1", "status": status, "code": code, "detail": detail, "meta": meta}
    return Answer({"type": "ErrorResponse", "error": error}, status)


def _serper(results: list[tuple[str, str, str]]) -> Any:
    items = [
        {"title": t, "link": u, "snippet": s, "position": i}
        for i, (u, t, s) in enumerate(results, start=1)
    ]
    return {"searchParameters": {"type": "search"}, "organic": items, "credits": 1}


def _tavily(results: list[tuple[str, str, str]]) -> Any:
    items = [
        {"url": u, "title": t, "content": s, "score": 0.9 - i / 100, "raw_content": None}
        for i, (u, t, s) in enumerate(results)
    ]
    return {"query": "q", "results": items, "images": [], "response_time": 1.1}


DOCUMENTED = {
    "google": Documented(
        _google,
        lambda a: (a.params["key"], a.params["cx"], a.method) == (KEY, ENGINE_ID, "GET"),
        lambda a: (a.params["q"], int(a.params["num"]), int(a.params["start"]) - 1),
        _google_error(403, "The request is missing a valid API key.", "forbidden"),
        _google_error(429, "Quota exceeded for limit 'Queries per day'", "rateLimitExceeded"),
        _google_error(429, "Quota exceeded for limit 'Queries per minute'", "rateLimitExceeded"),
    ),
    "serpapi": Documented(
        _serpapi,
        lambda a: (a.params["api_key"], a.params["engine"], a.method) == (KEY, "google", "GET"),
        lambda a: (a.params["q"], int(a.params["num"]), int(a.params["start"])),
        Answer({"error": "Invalid API key. Your API key should be here: ..."}, 401),
        Answer({"error": "Your account has run out of searches."}, 429),
        Answer({"error": "You are exceeding your hourly throughput limit."}, 429),
    ),
    "brave": Documented(
        _brave,
        lambda a: (a.headers["X-Subscription-Token"], a.method) == (KEY, "GET"),
        lambda a: (a.params["q"], int(a.params["count"]), int(a.params["offset"]) * 20),
        _brave_error(422, "SUBSCRIPTION_TOKEN_INVALID", "The provided token is invalid."),
        _brave_error(429, "QUOTA_LIMITED", "Request quota limit exceeded for plan."),
        _brave_error(429, "RATE_LIMITED", "Request rate limit exceeded for plan."),
    ),
    "serper": Documented(
        _serper,
        lambda a: (a.headers["X-API-KEY"], a.method) == (KEY, "POST"),
        lambda a: (a.body["q"], a.body["num"], (a.body["page"] - 1) * 10),
        Answer({"message": "Unauthorized.", "statusCode": 403}, 403),
        Answer({"message": "Not enough credits", "statusCode": 400}, 400),
        Answer({"message": "Too many requests", "statusCode": 429}, 429),
    ),
    "tavily": Documented(
        _tavily,
        lambda a: (a.headers["Authorization"], a.method) == (f"Bearer {KEY}", "POST"),
        lambda a: (a.body["query"], a.body["max_results"], 0),
        Answer({"detail": {"error": "Unauthorized: missing or invalid API key."}}, 401),
        Answer({"detail": {"error": "This request exceeds your plan's set usage limit."}}, 432),
        Answer({"detail": {"error": "Your request has been blocked: excessive requests."}}, 429),
    ),
}


@pytest.fixture(params=sorted(DOCUMENTED))
def name(request: pytest.FixtureRequest) -> str:
    """Run the test for every service."""
    return str(request.param)


@pytest.fixture
def documented(name: str) -> Documented:
    """Return the documented forms of the service `name`."""
    return DOCUMENTED[name]


@pytest.fixture
def open_at(name: str) -> Iterator[Callable[..., OnlineRetriever]]:
    """Yield a function that opens the service `name` at a fake of it, and close what it opened."""
    engines: list[OnlineRetriever] = []

    def open_engine(server: Web, **options: Any) -> OnlineRetriever:
        settings = {"requests_per_second": 10_000.0, "online_timeout": 5.0, **options}
        config = OnlineConfig(online_url=f"{server.url}/api", **settings)
        engines.append(open_online(name, config, AddressPolicy()))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()
