"""Probes and preflight checks of the tools that use the retrieval server."""

import asyncio
import json
import logging
import os
import pickle
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from search_r1.agent.generation import build_environment
from search_r1.agent.retriever import ServedSearch, ServedTool, build_search
from search_r1.agent.search import SearchTool
from search_r1.agent.visit import ServedVisit, VisitTool
from search_r1.agent.with_token import WithToken
from search_r1.retrieval.in_memory import InMemoryRetrieval
from search_r1.retrieval.protocol import EmptyRetrieval
from search_r1.retrieval.schema import Document
from search_r1.retrieval.service.app import create_app
from search_r1.retrieval.settings import ServiceConfig
from tests.apps import running
from tests.bad_models import whole_model
from tests.retrieval.service.fake_backends import FakeBackend
from verl.agent.served import tool_problems
from verl.config import Config, cli
from verl.config.agent import ServerConfig
from verl.errors import ConfigError, ToolError, ToolRefused
from verl.trainer.main_ppo import main
from verl.types import Prompt, start_trajectory

ROW = {
    "data_source": "nq",
    "prompt": [{"role": "user", "content": "q"}],
    "reward_model": {"ground_truth": {"target": ["a"]}},
}
TOKEN = "planted-93"


def run_options(folder: Path) -> list[str]:
    """Return complete options of a tiny run, except for its retriever."""
    whole_model(folder / "model", max_shard_size=1_000_000)
    (folder / "rows.jsonl").write_text((json.dumps(ROW) + "\n") * 4)
    return [
        f"data.train_files={folder}/rows.jsonl", f"data.val_files={folder}/rows.jsonl",
        f"actor_rollout_ref.model.path={folder}/model", "trainer.device=cpu",
        f"trainer.default_local_dir={folder}/run", "data.train_batch_size=4",
        "trainer.n_gpus_per_node=1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("service", "token", "options", "says"),
    [
        ({}, TOKEN, (), ("401", "export RETRIEVER_TOKEN")),
        ({"max_topk": 2, "topk": 2}, None, (), ("422", "retriever.topk", "--max_topk")),
        ({}, None, ("retriever.url={url}/v2/retrieve",), ("404", "http://HOST:PORT/retrieve")),
        ({}, TOKEN, ("agent.tools=[visit]",), ("visit: ", "401", "export RETRIEVER_TOKEN")),
        ({}, None, ("agent.tools=[visit]",), ("visit: ", "no document", "--corpus_path")),
    ],
)
def test_a_run_that_its_retriever_refuses_ends_before_it_begins(
    service: dict[str, Any], token: str | None, options: tuple[str, ...], says: tuple[str, ...],
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A server may answer `/health` but refuse the run's search: exit status 2 and one line."""
    monkeypatch.delenv("RETRIEVER_TOKEN", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    sound = run_options(tmp_path)
    capsys.readouterr()
    with running(create_app(FakeBackend(), ServiceConfig(**service), token=token)) as url:
        own = (f"retriever.url={url}/retrieve", *(option.format(url=url) for option in options))
        assert main([*sound, *own]) == 2
    head, *lines = capsys.readouterr().err.strip().splitlines()
    assert "1 problem" in head and len(lines) == 1 and url in lines[0]
    assert all(part in lines[0] for part in says) and "Traceback" not in lines[0]
    assert not list((tmp_path / "run").glob("metrics*"))


def test_a_run_that_its_retriever_serves_may_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The preflight passes with the token in the environment and an allowed topk."""
    monkeypatch.setenv("RETRIEVER_TOKEN", TOKEN)

    def find(id: str) -> Document:
        return Document.from_title(id, "T", "text")

    with running(
        create_app(FakeBackend(), ServiceConfig(max_topk=3), token=TOKEN, find=find)
    ) as url:
        own = (f"retriever.url={url}/retrieve", "agent.tools=[search,visit]")
        assert list(tool_problems(tools_of(run_options(tmp_path), *own), 30.0)) == []


def tools_of(options: list[str], *more: str) -> Any:
    return build_environment(cli.compose([*options, *more]))


class Scripted:
    """An ASGI app that sends scripted responses, then empty results."""

    def __init__(self, *answers: tuple[int, bytes]) -> None:
        self.answers = list(answers)
        self.requests: list[dict[str, Any]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if body:
            self.requests.append(json.loads(body))
        status, text = self.answers.pop(0) if self.answers else (200, b'{"result":[[]]}')
        length = (b"content-length", str(len(text)).encode())
        await send({"type": "http.response.start", "status": status, "headers": [length]})
        await send({"type": "http.response.body", "body": text})


def search_tool(url: str, **options: Any) -> ServedSearch:
    return ServedSearch(ServerConfig(url=url, **options))


def visit_tool(url: str) -> ServedVisit:
    return ServedVisit(ServerConfig(url=url))


@pytest.mark.parametrize("make", [search_tool, visit_tool])
@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ([], ""),
        ([(500, b"x")], ""),
        ([(500, b"x")] * 9, "500"),
        ([(200, b"<html>")], ""),
        ([(200, b"<html>")] * 9, "outside the wire contract"),
        ([(424, b"not in the record"), (200, b'{"retriever": "replay"}')], ""),
    ],
)
def test_a_probe_tells_whether_searches_are_answered(
    make: Callable[[str], ServedTool], answers: list[tuple[int, bytes]], says: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """A single error, one invalid response, or a replay's unrecorded query is not an outage.

    Only the reason is returned, without advice and without a log line.
    """
    with running(Scripted(*answers)) as url, caplog.at_level(logging.INFO, "search_r1"):
        problem = make(url).probe(30.0)
    assert says in problem and bool(problem) == bool(says)
    assert caplog.records == [] and "start the retriever" not in problem


@pytest.mark.parametrize("make", [search_tool, visit_tool])
@pytest.mark.parametrize("status", [302, 400, 401, 403, 404, 405, 413, 421, 422])
def test_a_refusal_is_no_outage_to_wait_for(make: Callable[[str], ServedTool], status: int) -> None:
    """A refusal is not retried; one line has the address, the status and the server's message."""
    app = Scripted(*[(status, b"what\r\n\x1b[31m is wrong")] * 9)
    with running(app) as url, pytest.raises(ToolRefused) as caught:
        make(url).probe(30.0)
    line = str(caught.value)
    assert url in line and str(status) in line and "what [31m is wrong" in line
    assert line.isprintable() and len(app.requests) == 1


def found(*contents: str) -> bytes:
    documents = [{"id": text, "contents": text} for text in contents]
    return json.dumps({"result": [documents]}).encode()


def test_a_preflight_looks_at_what_is_found(caplog: pytest.LogCaptureFixture) -> None:
    """Documents without any text are refused; a search without documents is a warning."""
    answers = found('"A"\n ', " "), found(" ", '"Paris"\nParis is ...'), found()
    with running(Scripted(*((200, body) for body in answers))) as url:
        [error] = search_tool(url).preflight(30.0)
        assert isinstance(error, ToolRefused) and "2 documents without text" in str(error)
        assert list(search_tool(url).preflight(30.0)) == [] and not caplog.records
        assert list(search_tool(url).preflight(30.0)) == []
    assert "no documents for" in caplog.text


def test_a_run_counts_what_is_missing_in_its_documents() -> None:
    """Each search counts whether it found nothing, and its documents without text."""
    documents = [Document.from_contents("1", ""), Document.from_contents("2", "a text")]
    retrieval = InMemoryRetrieval({"some": documents})

    def faults(query: str) -> tuple[int, int]:
        counts = asyncio.run(SearchTool(retrieval).call(query=query)).faults
        return counts["searches_without_documents"], counts["documents_without_text"]

    assert (faults("some"), faults("none")) == ((0, 1), (1, 0))


def test_a_dialogue_says_what_its_searches_gave() -> None:
    """As shares: of searches, of documents, and of searches that hold an accepted answer."""
    good, blank = Document.from_title("1", "Oslo", "The capital."), Document.from_contents("2", "")
    tool = SearchTool(InMemoryRetrieval({"both": [good, blank], "blank": [blank]}))
    shares = []
    for answers, queries in ((("OSLO",), ("both", "none")), ((), ("blank",)), (("x",), ())):
        own = tool.for_dialogue(start_trajectory(Prompt("rows#1", (1,), "nq", answers)))
        for query in queries:
            asyncio.run(own.call(query=query))
        shares.append(own.ended())
    assert shares == [
        {"empty_result_share": 0.5, "answer_result_share": 0.5, "blank_result_share": 0.5},
        {"empty_result_share": 0.0, "blank_result_share": 1.0},
        {},
    ]
    asyncio.run(tool.call(query="both"))
    assert tool.ended() == {}
    control = SearchTool(EmptyRetrieval()).for_dialogue(
        start_trajectory(Prompt("r#1", (1,), "nq", ()))
    )
    asyncio.run(control.call(query="any"))
    assert control.ended() == {}, "a control without documents gives no alarm"


def test_a_service_that_refuses_for_good_is_no_replay() -> None:
    """Status 424 counts as a refusal unless the server is a replay, e.g. for a spent quota."""
    app = Scripted((424, b"the quota is spent"), (200, b'{"retriever": "serper"}'))
    with running(app) as url, pytest.raises(ToolRefused):
        search_tool(url).probe(30.0)


def test_a_probe_asks_as_the_run_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's topk is sent; preflight checks every address, a probe any one of them."""
    first, second = Scripted(), Scripted((401, b"no"))
    with running(first) as first_url, running(second) as second_url:
        tool = search_tool(f"{first_url}, {second_url}/retrieve", topk=7)
        [error] = tool.preflight(30.0)
        assert isinstance(error, ToolRefused) and second_url in str(error)
        assert tool.probe(30.0) == ""
    assert {request["topk"] for request in first.requests + second.requests} == {7}


def test_every_address_that_refuses_is_told() -> None:
    """A user can then fix all of them at once."""
    with running(Scripted(*[(401, b"no")] * 2)) as url:
        errors = list(search_tool(f"{url}, {url}/retrieve").preflight(30.0))
    assert [type(error) for error in errors] == [ToolRefused] * 2


@pytest.mark.parametrize("part", ["corpus", "index", "encoder", "nothing"])
def test_addresses_serve_the_same_documents(
    part: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any of them may answer any search: another corpus is refused, another index is a warning.

    A server that does not tell its corpus is compared by what it tells.
    """
    facts = {"corpus": {"sha": "a"}, "encoder": {"model": "e5"}, "metric": "dot"}
    changes = {
        "corpus": {"corpus": {"sha": "b"}}, "index": {"metric": "l2"}, "encoder": {"encoder": {}},
    }  # fmt: skip
    served = facts, {"metric": "dot"}, {**facts, **changes.get(part, {})}
    with ExitStack() as stack:
        urls = []
        for own in served:
            backend = FakeBackend()
            monkeypatch.setattr(backend, "info", lambda own=own: own)
            urls.append(stack.enter_context(running(create_app(backend, ServiceConfig()))))
        problems = list(search_tool(",".join(urls)).preflight(30.0))
        identity = search_tool(urls[0]).identity()
    assert set(identity) == {"corpus", "encoder", "index"}
    assert [type(problem) for problem in problems] == [ToolRefused] * (part == "corpus")
    text = " ".join(map(str, problems)) + caplog.text
    assert (part != "nothing") is (f"another {part} at {urls[2]} than at {urls[0]}" in text)
    assert caplog.text.count("fix: ") == (part in ("index", "encoder"))


@pytest.mark.parametrize("make", [search_tool, visit_tool])
def test_a_probe_makes_three_attempts(make: Callable[[str], ServedTool]) -> None:
    """One or two errors are not an outage; after the third the probe stops."""
    app = Scripted(*[(500, b"x")] * 9)
    with running(app) as url:
        assert make(url).probe(30.0) != ""
    assert len(app.answers) == 9 - 3


@pytest.mark.parametrize("scheme", ["http", "HTTP"])
def test_only_the_word_for_no_server_is_none(scheme: str) -> None:
    """Only `empty` means "no server"; any other address is probed."""
    with running(Scripted(*[(401, b"no")] * 2)) as url:
        tool = search_tool(url.replace("http", scheme))
        assert len(list(tool.preflight(30.0))) == 1
        with pytest.raises(ToolRefused):
            tool.probe(30.0)
    for nowhere in (SearchTool(EmptyRetrieval()), VisitTool(None)):
        assert (list(nowhere.preflight(30.0)), nowhere.probe(30.0)) == ([], "")


def test_a_probe_takes_no_longer_than_it_may() -> None:
    """A server that never responds is unavailable; the preflight allows for a slow first search."""
    slow = Scripted()

    async def silent(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def late(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.6)
        await slow(scope, receive, send)

    with running(silent) as url:
        assert "does not answer" in search_tool(url).probe(0.2)
    with running(late) as url:
        assert "does not answer" in search_tool(url).probe(0.2)
        assert list(search_tool(url).preflight(0.2)) == []


@pytest.mark.parametrize(
    ("status", "kind"), [(401, ToolRefused), (404, ToolRefused), (422, ToolError), (500, ToolError)]
)
def test_a_call_tells_what_no_other_call_would_mend(status: int, kind: type[ToolError]) -> None:
    """A status that concerns every call raises ToolRefused; others raise ToolError."""
    config = Config()
    config.retriever.max_retries = 0
    with running(Scripted(*[(status, b"no")] * 9)) as url:
        config.retriever.url = url
        tool = build_search(config)

        async def call() -> None:
            try:
                await tool.call(query="q")
            finally:
                await tool.aclose()

        with pytest.raises(ToolError) as caught:
            asyncio.run(call())
    assert type(caught.value) is kind and caught.value.faults["searches_failed"] == 1


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "http://", "ftp://x", "http://x:0", ","])
def test_an_address_that_is_none_is_an_option_to_mend(url: str) -> None:
    """The message has no traceback, but what was got and what is expected."""
    config = Config()
    config.retriever.url = url
    with pytest.raises(ConfigError, match=r"retriever.*expected"):
        build_search(config)


def test_processes_of_other_nodes_get_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token is pickled with the factory, and never appears in a repr or a message."""
    monkeypatch.setenv("RETRIEVER_TOKEN", TOKEN)
    sent, shown = pickle.dumps(WithToken(build_environment)), repr(WithToken(build_environment))
    monkeypatch.delenv("RETRIEVER_TOKEN")
    config = Config()
    with running(create_app(FakeBackend(), token=TOKEN)) as url:
        config.retriever.url = url
        [error] = tool_problems(build_environment(config), 30.0)
        assert "401" in str(error) and TOKEN not in f"{error}{shown}"
        assert list(tool_problems(pickle.loads(sent)(config), 30.0)) == []
    assert os.environ["RETRIEVER_TOKEN"] == TOKEN
