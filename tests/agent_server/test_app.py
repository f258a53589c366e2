"""The agent server, called by the `openai` client over a real port."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import jinja2
import openai
import pytest

from search_r1.agent_server import requests
from search_r1.retrieval.client import RetrievalClient
from tests.agent_server.services import MODEL, serving
from tests.fakes import ByteTokenizer, ScriptedEngine, UnavailableRetriever
from tests.inference.scripted import SHORT, TWO_SEARCHES, SpellingEngine, session
from verl.errors import AnswerInvalid, ConfigError
from verl.types import Completion, Sampling

QUESTION = "Capital of Norway?"
SEARCHES = [
    {"query": "capital of Norway",
     "documents": [{"id": "12", "title": "Oslo"}, {"id": "7", "title": "Norway"}]},
    {"query": "Oslo", "documents": [{"id": "12", "title": "Oslo"}]},
]  # fmt: skip
THOUGHTS = "Where?\n\nSure?\n\nSo it is."


def client(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)


def ask(url: str, messages: Any = None, **more: Any) -> Any:
    """Request one completion, whole or as a stream."""
    messages = messages or [{"role": "user", "content": QUESTION}]
    return client(url).chat.completions.create(**({"model": MODEL, "messages": messages} | more))


def prompt_of(engine: ScriptedEngine) -> str:
    """Return the first prompt without its end-of-sequence token."""
    return ByteTokenizer().decode(engine.requests[0].prompt_ids)


def test_an_answer_with_its_searches() -> None:
    """Content, reasoning, searches, counts and finish reason are in their fields."""
    with serving(session(ScriptedEngine(TWO_SEARCHES))) as url:
        got = ask(url)
    (choice,) = got.choices
    assert (choice.message.content, choice.finish_reason) == ("Oslo", "stop")
    assert choice.message.reasoning_content == THOUGHTS
    facts = choice.message.search_r1
    assert (facts["searches"], facts["status"], facts["turns"]) == (SEARCHES, "answered", 3)
    assert facts["observation_tokens"] > 0
    num_prompt = len(SHORT.user_prompt(QUESTION))
    assert got.usage.prompt_tokens == num_prompt
    assert got.usage.completion_tokens == len("".join(TWO_SEARCHES))
    assert got.usage.total_tokens == num_prompt + got.usage.completion_tokens
    assert (got.object, got.model) == ("chat.completion", MODEL)


@pytest.mark.parametrize("kind", [ScriptedEngine, SpellingEngine])
def test_a_stream_says_the_same_as_a_whole_answer(kind: type[ScriptedEngine]) -> None:
    """The deltas of a stream add up to the whole response, with searches in between."""
    with serving(session(kind(TWO_SEARCHES * 2))) as url:
        whole = ask(url)
        chunks = list(ask(url, stream=True, stream_options={"include_usage": True}))
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].usage == whole.usage and chunks[-1].choices == []
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    message = whole.choices[0].message
    assert deltas[0].role == "assistant"
    assert "".join(d.content or "" for d in deltas) == message.content
    assert "".join(getattr(d, "reasoning_content", "") for d in deltas) == message.reasoning_content
    parts = [d.search_r1 for d in deltas if hasattr(d, "search_r1")]
    assert [search for part in parts[:-1] for search in part["searches"]] == SEARCHES
    assert parts[-1] == message.search_r1
    ends = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
    assert ends == [None] * (len(ends) - 1) + ["stop"]
    order = ["search_r1" if hasattr(d, "search_r1") else "other" for d in deltas]
    assert "other" in order[order.index("search_r1") :]  # searches are not all sent at the end


def test_earlier_messages_are_history() -> None:
    """Only the last question is put in the format's wording; earlier messages are unchanged."""
    engine = ScriptedEngine(["<answer> Stockholm </answer>"])
    parts = [{"type": "text", "text": "And"}, {"type": "text", "text": "Sweden?"}]
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "Oslo"},
        {"role": "user", "content": parts},
    ]
    with serving(session(engine)) as url:
        assert ask(url, messages).choices[0].message.content == "Stockholm"
    worded = SHORT.user_prompt("And\nSweden?")
    assert prompt_of(engine) == f"Be brief.\n{QUESTION}\nOslo\n{worded}"


def test_decoding_is_the_clients_to_choose() -> None:
    """Temperature and top_p reach the engine, and the seed determines the seed of every turn."""
    engine = ScriptedEngine(TWO_SEARCHES * 3)
    with serving(session(engine)) as url:
        for seed in (1, 1, 2):
            ask(url, temperature=0.5, top_p=0.9, seed=seed)
    first = engine.requests[0].sampling
    assert (first.temperature, first.top_p, first.stop) == (0.5, 0.9, SHORT.stop)
    seeds = [request.sampling.seed for request in engine.requests]
    assert seeds[:3] == seeds[3:6] != seeds[6:]


def test_without_a_seed_the_engine_chooses() -> None:
    """Without a seed, repeated requests may give different answers."""
    engine = ScriptedEngine(TWO_SEARCHES)
    with serving(replace(session(engine), seed=None)) as url:
        ask(url, temperature=1.0)
    assert {request.sampling.seed for request in engine.requests} == {None}


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_without_an_answer_the_reason_is_length(name: str) -> None:
    """If the client's token limit is reached first, the content is empty."""
    budget = len(TWO_SEARCHES[0])
    with serving(session(ScriptedEngine(TWO_SEARCHES))) as url:
        got = ask(url, **{name: budget})
    (choice,) = got.choices
    assert (choice.message.content, choice.finish_reason) == ("", "length")
    assert got.usage.completion_tokens == budget
    assert choice.message.search_r1["searches"] == SEARCHES[:1]


def test_there_is_one_model() -> None:
    """Only the served model is listed and found."""
    with serving(session(ScriptedEngine([]))) as url:
        assert [model.id for model in client(url).models.list()] == [MODEL]
        assert client(url).models.retrieve(MODEL).owned_by == "search-r1"
        with pytest.raises(openai.NotFoundError, match="search-r1"):
            client(url).models.retrieve("gpt")
        with pytest.raises(openai.NotFoundError) as caught:
            ask(url, model="gpt")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_only_a_long_prompt_exceeds_the_context() -> None:
    """Clients shorten the history at this code, in vain for roles that the template refuses."""

    class Alternates(ByteTokenizer):
        def apply_chat_template(self, conversation: Any, **options: Any) -> str:
            raise jinja2.TemplateError("Conversation roles must alternate")

        chat_template = "alternates"

    agent = replace(session(ScriptedEngine([])), tokenizer=Alternates())
    with serving(agent) as url, pytest.raises(openai.BadRequestError) as caught:
        ask(url, [{"role": "user", "content": "a"}, {"role": "user", "content": QUESTION}])
    assert (caught.value.param, caught.value.code) == ("messages", None)


@pytest.mark.parametrize(
    ("wrong", "param", "code"),
    [
        ({"messages": [{"role": "assistant", "content": "a"}]}, "messages", None),
        ({"messages": [{"role": "user", "content": " "}]}, "messages", None),
        ({"messages": [{"role": "user", "content": "word " * 999}]}, "messages",
         "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
         "messages", "unsupported_content"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role", None),
        ({"temperature": 3}, "temperature", None),
        ({"max_tokens": 0}, "max_tokens", None),
        ({"n": 2}, "n", "unsupported_parameter"),
        ({"stop": ["x"]}, "stop", "unsupported_parameter"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools",
         "unsupported_parameter"),
        ({"response_format": {"type": "json_object"}}, "response_format",
         "unsupported_parameter"),
        ({"extra_body": {"top_k": 5}}, "top_k", "unsupported_parameter"),
        ({"extra_body": {"repetition_penalty": 1.1}}, "repetition_penalty",
         "unsupported_parameter"),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
         "chat_template_kwargs", "unsupported_parameter"),
        ({"extra_body": {"max_token": 5}}, "max_token", "unknown_parameter"),
        ({"extra_body": {"temprature": 1}}, "temprature", "unknown_parameter"),
        ({"extra_body": {"stream_options": {"include_document": True}}}, "include_document",
         "unknown_parameter"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_request_is_told_what_is_wrong(
    wrong: dict[str, Any], param: str, code: str | None, stream: bool
) -> None:
    """Bad requests get an error in OpenAI's format before the engine is called, streams too."""
    engine = ScriptedEngine([])
    with (
        serving(session(engine)) as url,
        pytest.raises(openai.BadRequestError) as caught,
    ):
        ask(url, **wrong, stream=stream)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert caught.value.type == "invalid_request_error"
    assert engine.requests == []


def test_what_changes_nothing_may_be_sent() -> None:
    """Explicit default values and bookkeeping fields are accepted."""
    with serving(session(ScriptedEngine(TWO_SEARCHES))) as url:
        got = ask(url, n=1, stop=None, presence_penalty=0, user="me", store=False,
                  response_format={"type": "text"})  # fmt: skip
    assert got.choices[0].message.content == "Oslo"


def test_null_is_the_default_and_what_is_ignored_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Clients send null for what they leave open; a field without effect is named in the log."""
    everything = dict.fromkeys([*requests.ChatRequest.model_fields, *requests.UNSUPPORTED])
    message = {"role": "user", "content": QUESTION}
    body = {**everything, "model": MODEL, "messages": [message], "no_such_field": 1}
    body["stream_options"] = dict.fromkeys(requests.StreamOptions.model_fields)
    with serving(session(ScriptedEngine(TWO_SEARCHES * 2))) as url:
        answers = [post(url, json.dumps(body)) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert [text for text in caplog.messages if "is ignored" in text] == [
        "requests have the field no_such_field, which is ignored"
    ]


def test_a_retriever_that_is_away_is_503() -> None:
    """The status is 503, or the last event is an error if the stream has already started."""
    silent = ("<search> a </search>",)
    with (
        serving(session(ScriptedEngine(silent), UnavailableRetriever())) as url,
        pytest.raises(openai.InternalServerError) as caught,
    ):
        ask(url)
    assert (caught.value.status_code, caught.value.code) == (503, "retriever_unavailable")
    with (
        serving(session(ScriptedEngine(silent), UnavailableRetriever())) as url,
        pytest.raises(openai.InternalServerError) as caught,
    ):
        ask(url, stream=True)
    assert caught.value.status_code == 503
    deltas = []
    with (
        serving(session(ScriptedEngine(TWO_SEARCHES), UnavailableRetriever())) as url,
        pytest.raises(openai.APIError),
    ):
        for chunk in ask(url, stream=True):
            deltas.append(chunk.choices[0].delta)
    assert deltas[-1].reasoning_content == "Where?"


def test_health_is_the_retrievers_too() -> None:
    """The health check fails if the retrieval server does not answer."""
    with serving(session(ScriptedEngine([]))) as url:
        answer = httpx.get(f"{url}/health")
        assert (answer.status_code, answer.json()["status"]) == (200, "ok")
    unavailable = RetrievalClient("http://127.0.0.1:9", 3, max_retries=0)
    with serving(session(ScriptedEngine([]), unavailable)) as url:
        answer = httpx.get(f"{url}/health")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "retriever_unavailable"


class Broken(ScriptedEngine):
    """An engine that raises a user error, or an unexpected exception."""

    failure: Exception = ConfigError("endpoint: got nothing; fix: start it")

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        raise self.failure


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails_is_told_apart_from_a_bug(stream: bool) -> None:
    """User errors give 503 or 502 with their message; a bug gives 500 without details."""
    engine = Broken([])
    with serving(session(engine)) as url:
        with pytest.raises(openai.InternalServerError) as caught:
            list(ask(url, stream=stream))
        assert (caught.value.status_code, caught.value.code) == (503, "engine_unavailable")
        engine.failure = AnswerInvalid("endpoint: got {}; fix: correct --endpoint")
        with pytest.raises(openai.InternalServerError) as caught:
            list(ask(url, stream=stream))
        assert caught.value.status_code == 502
        engine.failure = RuntimeError("secret")
        with pytest.raises(openai.InternalServerError) as caught:
            list(ask(url, stream=stream))
    assert (caught.value.status_code, caught.value.code) == (500, "internal_error")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("token", ["sesame", "sésame"])
def test_a_token_is_wanted_where_there_is_one(token: str) -> None:
    """Every route except health requires the token, which is compared as UTF-8 bytes."""
    with serving(session(ScriptedEngine([])), token) as url:
        for headers in ({}, {"Authorization": "Bearer none"}, {"Authorization": token.encode()}):
            answer = httpx.get(f"{url}/v1/models", headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        right = {"Authorization": f"Bearer {token}".encode()}
        assert httpx.get(f"{url}/v1/models", headers=right).status_code == 200
        assert httpx.get(f"{url}/health").status_code == 200
        if token.isascii():
            assert [m.id for m in client(url, token).models.list()] == [MODEL]
            with pytest.raises(openai.AuthenticationError):
                ask(url)


def test_an_unknown_path_is_an_error_in_the_same_form() -> None:
    """Other OpenAI routes give a 404 in OpenAI's error format."""
    with serving(session(ScriptedEngine([]))) as url:
        with pytest.raises(openai.NotFoundError, match="/v1/embeddings"):
            client(url).embeddings.create(model=MODEL, input="a")
        answer = httpx.post(f"{url}/v1/chat/completions", content=b"{")
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


class Endless(ScriptedEngine):
    """Streams one word and then hangs; records that it was started and cancelled."""

    def __init__(self) -> None:
        super().__init__([])
        self.started, self.cancelled = threading.Event(), threading.Event()

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, listener: Any
    ) -> Completion:
        listener("Hm")
        self.started.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        raise AssertionError


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_dialogue(stream: bool) -> None:
    """If the client disconnects, the engine's turn is cancelled, streaming or not."""
    engine = Endless()
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Q?"}], "stream": stream}
    with serving(session(engine)) as url:
        with httpx.Client(timeout=60) as http:
            if stream:
                with http.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
                    events = (json.loads(e[6:]) for e in answer.iter_lines() if e)
                    deltas = (event["choices"][0]["delta"] for event in events)
                    assert next(d for d in deltas if "reasoning_content" in d)
            else:
                with pytest.raises(httpx.ReadTimeout):
                    http.post(f"{url}/v1/chat/completions", json=body, timeout=1)
        assert engine.started.is_set()
        assert engine.cancelled.wait(30)


class Both(SpellingEngine):
    """Hangs only if the question contains `endless`."""

    endless = Endless()

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, listener: Any
    ) -> Completion:
        if "endless" in ByteTokenizer().decode(prompt_ids):
            return await self.endless.stream(prompt_ids, sampling, listener)
        return await super().stream(prompt_ids, sampling, listener)


def test_dialogues_are_played_at_once() -> None:
    """A running stream does not block other dialogues, and they do not end it."""
    engine = Both(TWO_SEARCHES)
    with serving(session(engine)) as url:
        with ask(url, [{"role": "user", "content": "endless"}], stream=True) as stream:
            assert next(iter(stream)).choices[0].delta.role == "assistant"
            assert ask(url).choices[0].message.content == "Oslo"
            assert not engine.endless.cancelled.is_set()
        assert engine.endless.cancelled.wait(30)


def post(url: str, content: Any, **headers: str) -> httpx.Response:
    with httpx.Client(timeout=60, trust_env=False) as http:
        return http.post(f"{url}/v1/chat/completions", content=content, headers=headers)


def completion(content: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": content}]}).encode()


MESSAGES = b'{"model":"m","messages":[%s]}'
PARTS = MESSAGES % b'{"role":"user","content":[%s]}'
HOSTILE = {
    "messages": MESSAGES % b",".join([b"1"] * 50_000),
    "roles": MESSAGES % b",".join([b'{"role":1}'] * 50_000),
    "parts": PARTS % b",".join([b"1"] * 50_000),
    "types": PARTS % b",".join([b'{"type":1}'] * 50_000),
    "nested": PARTS % (b"[" * 100_000 + b"]" * 100_000),
    "lists": b'{"model":"m","x":[' + b",".join([b"[]"] * 300_000) + b"]}",
    "fields": b"{" + b",".join(b'"%d":1' % i for i in range(260_000)) + b"}",
    "no JSON": b"\xff" * 100_000, "nothing": b"", "list": b"[]", "digits": b"9" * 100_000,
    "temperature": b'{"model":"m","messages":[{"role":"user"}],"temperature":NaN}',
    "top_p": b'{"model":"m","messages":[{"role":"user"}],"top_p":Infinity}',
    "seed": b'{"model":"m","messages":[{"role":"user"}],"seed":' + b"9" * 5000 + b"}",
    "max_tokens": b'{"model":"m","messages":[{"role":"user"}],"max_tokens":1e400}',
    "seed of nan": b'{"model":"m","messages":[{"role":"user"}],"seed":NaN}',
    "messages of nan": b'{"model":"m","messages":NaN}',
    "penalty of nan": b'{"model":"search-r1","messages":[{"role":"user","content":"Q"}],'
                      b'"presence_penalty":NaN}',
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_bad_body_is_one_mistake_in_a_few_words(name: str) -> None:
    """A bad body gives a short error quickly, however many mistakes it has."""
    with serving(session(ScriptedEngine([]))) as url:
        answer = post(url, HOSTILE[name])
    assert (answer.status_code, len(answer.content) < 500) == (400, True), answer.text[:500]
    assert answer.elapsed.total_seconds() < 5


def test_half_a_character_is_a_question_mark() -> None:
    """Lone surrogates, which tokenizers reject, are replaced in texts and parts."""
    engine = ScriptedEngine(TWO_SEARCHES * 2)
    with serving(session(engine)) as url:
        for content in ("Q\ud800", [{"type": "text", "text": "Q\ud800"}]):
            assert post(url, completion(content)).status_code == 200
    assert prompt_of(engine) == SHORT.user_prompt("Q?")


def test_a_long_prompt_is_refused_by_its_beginning() -> None:
    """A huge prompt is refused without tokenizing all of it, or by the body limit."""
    with serving(session(ScriptedEngine([]))) as url:
        for content in ("word " * 1_500_000, [{"type": "text", "text": "w" * 7_000_000}]):
            answer = post(url, completion(content))
            assert (answer.status_code, answer.elapsed.total_seconds() < 5) == (400, True)
            assert "over 4000 tokens" in answer.json()["error"]["message"]
        answer = post(url, completion("word " * 2_000_000))
        assert answer.status_code == 413 and "at most 8388608" in answer.json()["error"]["message"]


class Slow(ByteTokenizer):
    """A tokenizer that is slow for long texts."""

    begun, may_end = threading.Event(), threading.Event()

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        if len(text) > 1000:
            self.begun.set()
            assert self.may_end.wait(30)
        return super().encode(text, add_special_tokens=add_special_tokens)


def test_others_are_answered_while_a_prompt_is_tokenized() -> None:
    """Tokenizing does not block the event loop."""
    slow = replace(session(ScriptedEngine(TWO_SEARCHES)), tokenizer=Slow())
    with serving(slow) as url, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(post, url, completion("w" * 1500))
        assert Slow.begun.wait(30)
        assert httpx.get(f"{url}/health", timeout=20).status_code == 200
        Slow.may_end.set()
        assert asked.result().status_code == 200


def test_the_token_is_looked_at_before_the_body() -> None:
    """A client without the token gets 401 before its body has arrived."""
    with serving(session(ScriptedEngine([])), token="secret") as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), 20) as client:
            client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n"
                           b"Content-Length: 1000000\r\n\r\n{")  # fmt: skip
            assert client.recv(100).startswith(b"HTTP/1.1 401")


def test_a_body_that_never_ends_is_408(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that does not arrive in time gives 408."""
    monkeypatch.setattr(requests, "BODY_TIMEOUT_S", 0.1)
    with serving(session(ScriptedEngine([]))) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), 20) as client:
            client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n"
                           b"Content-Length: 1000000\r\n\r\n{")  # fmt: skip
            assert client.recv(100).startswith(b"HTTP/1.1 408")
