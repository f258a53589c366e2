"""The chat page over HTTP: its files, its content security policy and its texts."""

from __future__ import annotations

import re

import pytest
from fastapi.testclient import TestClient

from search_r1 import serve
from search_r1.agent_server.service import PAGE, AgentService, build_app
from tests.agent_server.services import MODEL
from tests.agent_server.test_app import QUESTION, SEARCHES, ask, serving
from tests.fakes import ScriptedEngine
from tests.inference.scripted import FOUND, TWO_SEARCHES, session

PEER = "http://127.0.0.1:8003"
SCRIPT = next(path for path in PAGE if path.name == "chat.js").read_text(encoding="utf-8")


def client(token: str | None = None, peers: tuple[str, ...] = ()) -> TestClient:
    service = AgentService(session(ScriptedEngine(TWO_SEARCHES)), MODEL, token, peers=peers)
    return TestClient(build_app(service), base_url="http://127.0.0.1:8001")


def test_the_files_of_the_page_are_open_and_nothing_else_is() -> None:
    """The page needs no token, and its policy allows its own scripts and server only."""
    http = client(token="secret")
    for path in PAGE:
        answer = http.get("/" if path.suffix == ".html" else f"/{path.name}")
        assert answer.content == path.read_bytes()
        policy = answer.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'self';") and "connect-src" not in policy
        assert "unsafe" not in policy and answer.headers["X-Content-Type-Options"] == "nosniff"
    for path in ("/app.py", "/..%2fapp.py", "/page/chat.js", "/main.js", "/docs"):
        assert http.get(path).status_code == 404
    assert http.get("/v1/models").status_code == 401


def test_pages_of_peers_alone_may_ask_from_another_address() -> None:
    """Only peers are named in the content security policy and the CORS headers."""
    preflight = {"Access-Control-Request-Method": "POST",
                 "Access-Control-Request-Headers": "authorization,content-type"}  # fmt: skip
    for peers, origin, status in (((), PEER, 405), ((PEER,), PEER, 200), ((PEER,), PEER[:-1], 400)):
        http = client(peers=peers)
        response = http.options("/v1/chat/completions", headers=preflight | {"Origin": origin})
        assert response.status_code == status
        allowed = response.headers.get("Access-Control-Allow-Origin")
        assert allowed == (PEER if status == 200 else None)
        assert http.get("/peers").json() == list(peers)
        policy = http.get("/").headers["Content-Security-Policy"]
        assert policy.endswith(f"connect-src 'self' {PEER}") == bool(peers)


@pytest.mark.parametrize("peer", ["127.0.0.1:8003", f"{PEER}/v1", "*", f"{PEER}; script-src *"])
def test_a_peer_is_an_address_without_a_path(peer: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Other values are not origins, or would change the page's content security policy."""
    assert serve.main(["--model", "m", "--chat-peers", peer]) == 2
    assert "--chat-peers: got" in capsys.readouterr().err


def test_a_stream_brings_texts_to_whom_wants_them() -> None:
    """With `include_documents`, searches have document texts; the last delta has none."""
    with serving(session(ScriptedEngine(TWO_SEARCHES))) as url:
        options = {"include_documents": True}
        fields = [getattr(chunk.choices[0].delta, "search_r1", None)
                  for chunk in ask(url, stream=True, stream_options=options)]  # fmt: skip
    *parts, whole = filter(None, fields)
    searches = [search for part in parts for search in part["searches"]]
    assert [[d["text"] for d in search["documents"]] for search in searches] == [
        [document.text for document in FOUND[search["query"]]] for search in SEARCHES
    ]
    assert whole["searches"] == SEARCHES and QUESTION
    announced = [part["searching"] for part in parts if "searching" in part]
    assert announced == [search["query"] for search in SEARCHES]
    kinds = ["searching" in part for part in parts]
    assert kinds == [True, False] * len(SEARCHES)  # each is announced before it is answered


def test_the_page_puts_data_in_as_text_only() -> None:
    """The script never turns strings into HTML or code, and nothing is loaded from elsewhere."""
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(",
                 "new Function", "srcdoc", "DOMParser", "://", "localStorage"):  # fmt: skip
        assert word not in SCRIPT, word
    html = next(path for path in PAGE if path.suffix == ".html").read_text(encoding="utf-8")
    assert "//" not in html and "style=" not in html


def test_every_text_is_there_in_both_languages() -> None:
    """Both languages have the same texts with the same placeholders, and all are used."""
    table = SCRIPT[SCRIPT.index("const TEXTS") : SCRIPT.index("\n};")]
    english, chinese = (
        dict(re.findall(r'(\w+): "([^"]*)"', part)) for part in table.split("  zh: {")
    )
    assert english.keys() == chinese.keys()
    rest = SCRIPT.replace(table, "") + next(p for p in PAGE if p.suffix == ".html").read_text()
    for name, words in chinese.items():
        assert re.search(rf'"{name}"', rest) or name == "other", name
        placeholders = re.findall(r"\{(\w+)\}", words)
        assert sorted(placeholders) == sorted(re.findall(r"\{(\w+)\}", english[name])), name
        assert name in ("other", "said") or re.search("[一-鿿]", words), name
