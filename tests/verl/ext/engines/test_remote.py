"""The remote engine with an in-memory server."""

import asyncio
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest

from tests.endless import DRIPS, FLOOD, endless
from tests.fakes import ByteTokenizer
from verl.errors import AnswerInvalid, ConfigError
from verl.ext.engines import remote
from verl.ext.engines.remote import EXTENSIONS, RemoteEngine, missing_stop
from verl.types import Completion, Sampling

STOP = ("</search>", "</answer>")
SAMPLING = Sampling(9, temperature=0.5, top_p=0.9, stop=STOP, seed=7)


def complete(choice: dict[str, Any], seen: list[httpx.Request], status: int = 200) -> Completion:
    """Return the engine's completion for a server's response."""

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(status, json={"choices": [choice]})

    transport = httpx.MockTransport(answer)
    engine = RemoteEngine("http://host:1/v1/", "m", ByteTokenizer(), transport=transport)
    return asyncio.run(engine.generate([1, 2, 3], SAMPLING))


def test_ids_are_sent_and_sampled_ids_are_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token ids and log-probs of the response are used as they are."""
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    seen: list[httpx.Request] = []
    choice = {
        "text": "<answer>a</answer>",
        "token_ids": [300, 301],
        "logprobs": {"token_logprobs": [-0.1, -0.2]},
        "finish_reason": "stop",
    }
    got = complete(choice, seen)
    assert got == Completion((300, 301), (-0.1, -0.2), "<answer>a</answer>", "stop")
    body = json.loads(seen[0].content)
    assert str(seen[0].url) == "http://host:1/v1/completions"
    assert "Authorization" not in seen[0].headers
    assert body["prompt"] == [1, 2, 3]
    assert (body["max_tokens"], body["temperature"], body["top_p"], body["seed"]) == (
        9,
        0.5,
        0.9,
        7,
    )
    assert body["stop"] == list(STOP)


def test_every_sampling_parameter_is_sent() -> None:
    """A server's generation_config.json, such as Qwen2.5's penalty of 1.05, decides none."""
    seen: list[httpx.Request] = []
    complete({"text": "x", "token_ids": [1]}, seen)
    body = json.loads(seen[0].content)
    neutral = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
               "frequency_penalty": 0.0, "min_tokens": 0, "ignore_eos": False, "n": 1,
               "stop_token_ids": [], "echo": False}  # fmt: skip
    assert {name: body[name] for name in neutral} == neutral


def refusing(known: Sequence[str], seen: list[dict[str, Any]], text: str) -> httpx.MockTransport:
    """Return a server that refuses the first field that is not `known`, in the words of `text`."""

    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        seen.append(body)
        for name in body:
            if name in EXTENSIONS and name not in known:
                return httpx.Response(400, json={"error": {"message": text.format(name)}})
        return httpx.Response(200, json={"choices": [SOUND]})

    return httpx.MockTransport(answer)


@pytest.mark.parametrize(
    "text",
    ["Unrecognized request argument supplied: {}", "Unknown parameter: '{}'.",
     "body.{}: Extra inputs are not permitted", "Unsupported parameter: '{}'"],
)  # fmt: skip
def test_a_field_that_a_server_does_not_know_is_left_out_with_a_warning(
    caplog: pytest.LogCaptureFixture, text: str
) -> None:
    """Only neutral extensions are; each is asked for once, and named once."""
    seen: list[dict[str, Any]] = []
    transport = refusing(("top_k",), seen, text)
    engine = RemoteEngine("http://host", "m", ByteTokenizer(), transport=transport)
    for _ in range(2):
        assert asyncio.run(engine.generate([1], SAMPLING)).ids == (1,)
    assert len(seen) == len(EXTENSIONS) + 1
    assert "top_k" in seen[-1] and not set(EXTENSIONS) & set(seen[-1]) - {"top_k"}
    dropped = " ".join(record.getMessage() for record in caplog.records)
    assert all(dropped.count(f"know {name}:") == 1 for name in EXTENSIONS if name != "top_k")


def test_a_value_that_a_server_refuses_is_an_error() -> None:
    """A server that knows a field would use its own default if the field were left out."""
    transport = refusing((), [], "{} must be at least 1")
    engine = RemoteEngine("http://host", "m", ByteTokenizer(), transport=transport)
    with pytest.raises(ConfigError, match=r"got 400 .*must be at least 1"):
        asyncio.run(engine.generate([1], SAMPLING))


def test_one_client_serves_all_requests_of_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Certificates are read once for an engine; another event loop gets another client."""
    contexts, clients = [], []
    make_context, make_client = httpx.create_ssl_context, httpx.AsyncClient
    monkeypatch.setattr(
        httpx, "create_ssl_context", lambda *a, **k: contexts.append(1) or make_context(*a, **k)
    )
    monkeypatch.setattr(
        httpx, "AsyncClient", lambda *a, **k: clients.append(1) or make_client(*a, **k)
    )
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json={"choices": [SOUND]}))
    engine = RemoteEngine("https://host", "m", ByteTokenizer(), transport=transport)

    async def ask() -> None:
        await asyncio.gather(*(engine.generate([1], SAMPLING) for _ in range(5)))

    for _ in range(2):
        asyncio.run(ask())
    assert (len(contexts), len(clients)) == (1, 2)


@pytest.mark.parametrize(
    ("url", "variable", "sent"),
    [
        ("http://host:1/v1", None, None),
        ("http://127.0.0.1:8000", None, None),
        ("https://api.openai.com.evil.org/v1", None, None),
        ("https://api.openai.com@evil.org/v1", None, None),
        ("http://api.openai.com/v1", None, None),
        ("https://api.openai.com/v1", None, "Bearer openai"),
        ("http://host:1/v1", "OWN_KEY", "Bearer own"),
        ("https://api.openai.com/v1", "OWN_KEY", "Bearer own"),
        ("http://host:1/v1", "OPENAI_API_KEY", "Bearer openai"),
    ],
)
def test_a_key_is_sent_only_to_its_endpoint(
    monkeypatch: pytest.MonkeyPatch, url: str, variable: str | None, sent: str | None
) -> None:
    """OpenAI's key is sent to OpenAI only; another key if its variable was named."""
    monkeypatch.setenv("OPENAI_API_KEY", "openai")
    monkeypatch.setenv("OWN_KEY", "own")
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(401, text="no")

    transport = httpx.MockTransport(answer)
    engine = RemoteEngine(url, "m", ByteTokenizer(), variable, transport)
    with pytest.raises(ConfigError, match="--api-key-env") as caught:
        asyncio.run(engine.generate([1], SAMPLING))
    header = seen[0].headers.get("Authorization")
    assert header == sent or (sent is None and header is not None and "Bearer" not in header)
    assert "openai:" not in str(caught.value)


def test_a_key_variable_that_is_not_set_is_an_error() -> None:
    """The error comes before anything is sent without the key."""
    with pytest.raises(ConfigError, match="export NOT_SET=KEY"):
        RemoteEngine("http://host", "m", ByteTokenizer(), "NOT_SET")


def test_text_alone_is_encoded_with_its_stop_string() -> None:
    """A plain server omits the stop string and returns no ids."""
    got = complete({"text": "<search> Oslo ", "finish_reason": "stop"}, [])
    assert got.text == "<search> Oslo </search>"
    assert list(got.ids) == list(b"<search> Oslo </search>")
    assert len(got.log_probs) == len(got.ids)


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("<search> q", "</search>"),
        ("<search>q</search> <answer> a", "</answer>"),
        ("<answer>a</answer>", ""),
        ("nothing", ""),
        ("<search> x <answer> y", "</answer>"),
    ],
)
def test_an_omitted_stop_string_is_that_of_the_open_tag(text: str, missing: str) -> None:
    """The last tag that is still open determines it."""
    assert missing_stop(text, STOP) == missing


@pytest.mark.parametrize(
    ("reason", "text"),
    [(None, "<answer> Oslo"), (151645, "<answer> Oslo"), ("</answer>", "<answer> Oslo</answer>")],
)
def test_a_tag_that_the_policy_left_open_stays_open(reason: object, text: str) -> None:
    """VLLM names the stop string that ended a text; null and ids are ends of sequence."""
    choice = {"text": "<answer> Oslo", "finish_reason": "stop", "stop_reason": reason}
    assert complete(choice, []).text == text


@pytest.mark.parametrize("url", ["http://host:port", "http://[::1"])
def test_an_invalid_address_is_rejected(url: str) -> None:
    """It is rejected in one line when the engine is built."""
    with pytest.raises(ConfigError, match=r"endpoint: got http.*as in http://host:8000"):
        RemoteEngine(url, "m", ByteTokenizer())


def test_an_error_status_names_the_endpoint_and_the_fix() -> None:
    """The server's status and text are in the message."""
    with pytest.raises(ConfigError, match=r"http://host:1/v1/completions: got 404.*vllm serve"):
        complete({}, [], status=404)


SOUND = {"text": "x", "token_ids": [1], "logprobs": {"token_logprobs": [-1.0]}}
OTHERS = (None, 7, 1.5, True, "x", [], {}, [None], ["x"], [[]], {"x": 1})


def other_types() -> Iterator[object]:
    """Yield responses with a value of a wrong type in each position."""
    yield from OTHERS
    yield from ({"choices": other} for other in OTHERS)
    yield from ({"choices": [other]} for other in OTHERS)
    for name, allowed in (("text", ["x"]), ("token_ids", [None, []]), ("logprobs", [None, {}])):
        for other in OTHERS:
            if other not in allowed and not (name == "logprobs" and other == {"x": 1}):
                yield {"choices": [{**SOUND, name: other}]}
    yield from ({"choices": [{**SOUND, "token_ids": [other]}]} for other in (-1, 1.5, True, "1"))


def test_responses_of_wrong_types_are_reported_in_one_line() -> None:
    """None of them is accepted as a completion or causes a traceback."""
    responses = [json.dumps(response).encode() for response in other_types()]
    for body in (*responses, b"", b"<html>", b"\xff", b"[" * 10_000):
        transport = httpx.MockTransport(lambda _, body=body: httpx.Response(200, content=body))
        engine = RemoteEngine("http://host:1/v1/", "m", ByteTokenizer(), transport=transport)
        with pytest.raises(AnswerInvalid, match=r"http://host:1/v1/completions: got") as caught:
            asyncio.run(engine.generate([1, 2, 3], SAMPLING))
        assert "\n" not in str(caught.value)


def test_missing_log_probs_are_nan() -> None:
    """Servers may write null for a token, such as the first."""
    got = complete({**SOUND, "logprobs": {"token_logprobs": [None]}}, [])
    assert len(got.log_probs) == 1 and math.isnan(got.log_probs[0])


@pytest.mark.parametrize("name", DRIPS)
def test_a_slow_response_has_one_deadline(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """One deadline covers headers and body, however often a byte arrives."""
    monkeypatch.setattr(remote, "TIMEOUT", 0.4)
    with endless(*DRIPS[name]) as (url, _), pytest.raises(ConfigError, match="Timeout") as caught:
        asyncio.run(RemoteEngine(url, "m", ByteTokenizer()).generate([1], SAMPLING))
    assert not isinstance(caught.value, AnswerInvalid)


def test_an_endless_response_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most MAX_BYTES of it are read."""
    monkeypatch.setattr(remote, "MAX_BYTES", 100_000)
    message = "more than 100000 bytes"
    with endless(*FLOOD, pause=0.0) as (url, _), pytest.raises(AnswerInvalid, match=message):
        asyncio.run(RemoteEngine(url, "m", ByteTokenizer()).generate([1], SAMPLING))
