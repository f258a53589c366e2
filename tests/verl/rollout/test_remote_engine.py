"""The remote engine against a server in memory."""

import asyncio
import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.endless import DRIPS, FLOOD, endless
from tests.fakes import ByteTokenizer
from verl.errors import AnswerInvalid, ConfigError
from verl.rollout import remote_engine
from verl.rollout.remote_engine import RemoteEngine, missing_stop
from verl.types import Completion, Sampling

STOP = ("</search>", "</answer>")
SAMPLING = Sampling(9, temperature=0.5, top_p=0.9, stop=STOP, seed=7)


def complete(choice: dict[str, Any], seen: list[httpx.Request], status: int = 200) -> Completion:
    """What the engine makes of a server's answer."""

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(status, json={"choices": [choice]})

    transport = httpx.MockTransport(answer)
    engine = RemoteEngine("http://host:1/v1/", "m", ByteTokenizer(), transport=transport)
    return asyncio.run(engine.generate([1, 2, 3], SAMPLING))


def test_ids_go_in_and_sampled_ids_come_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that returns token ids is believed, with its log-probs."""
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
def test_a_key_goes_to_the_endpoint_it_is_meant_for(
    monkeypatch: pytest.MonkeyPatch, url: str, variable: str | None, sent: str | None
) -> None:
    """OpenAI's goes to OpenAI alone; another is sent where its variable was named."""
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
    found = seen[0].headers.get("Authorization")
    assert found == sent or (sent is None and found is not None and "Bearer" not in found)
    assert "openai:" not in str(caught.value)


def test_a_named_key_that_is_not_set_is_refused() -> None:
    """Before anything is sent without it."""
    with pytest.raises(ConfigError, match="export NOT_SET=KEY"):
        RemoteEngine("http://host", "m", ByteTokenizer(), "NOT_SET")


def test_text_alone_is_encoded_with_its_stop_string() -> None:
    """A plain server leaves the stop string off and gives no ids."""
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
def test_the_stop_string_left_off_is_that_of_the_open_tag(text: str, missing: str) -> None:
    """The last tag that is still open decides."""
    assert missing_stop(text, STOP) == missing


@pytest.mark.parametrize("url", ["http://host:port", "http://[::1"])
def test_a_text_that_is_no_address_is_refused(url: str) -> None:
    """Where the engine is made, in one line."""
    with pytest.raises(ConfigError, match=r"endpoint: got http.*as in http://host:8000"):
        RemoteEngine(url, "m", ByteTokenizer())


def test_a_refusal_names_the_endpoint_and_the_fix() -> None:
    """Status and text of the server are in the message."""
    with pytest.raises(ConfigError, match=r"http://host:1/v1/completions: got 404.*vllm serve"):
        complete({}, [], status=404)


SOUND = {"text": "x", "token_ids": [1], "logprobs": {"token_logprobs": [-1.0]}}
OTHERS = (None, 7, 1.5, True, "x", [], {}, [None], ["x"], [[]], {"x": 1})


def other_types() -> Iterator[object]:
    """Answers with a value of another type in each place."""
    yield from OTHERS
    yield from ({"choices": other} for other in OTHERS)
    yield from ({"choices": [other]} for other in OTHERS)
    for name, allowed in (("text", ["x"]), ("token_ids", [None, []]), ("logprobs", [None, {}])):
        for other in OTHERS:
            if other not in allowed and not (name == "logprobs" and other == {"x": 1}):
                yield {"choices": [{**SOUND, name: other}]}
    yield from ({"choices": [{**SOUND, "token_ids": [other]}]} for other in (-1, 1.5, True, "1"))


def test_answers_of_other_types_are_told_in_one_line() -> None:
    """None of them is a completion, and none a traceback."""
    answers = [json.dumps(answer).encode() for answer in other_types()]
    for body in (*answers, b"", b"<html>", b"\xff", b"[" * 10_000):
        transport = httpx.MockTransport(lambda _, body=body: httpx.Response(200, content=body))
        engine = RemoteEngine("http://host:1/v1/", "m", ByteTokenizer(), transport=transport)
        with pytest.raises(AnswerInvalid, match=r"http://host:1/v1/completions: got") as caught:
            asyncio.run(engine.generate([1, 2, 3], SAMPLING))
        assert "\n" not in str(caught.value)


def test_log_probs_that_were_not_given_are_no_numbers() -> None:
    """None for a token, as servers write for the first, is not taken for a log-prob."""
    got = complete({**SOUND, "logprobs": {"token_logprobs": [None]}}, [])
    assert len(got.log_probs) == 1 and math.isnan(got.log_probs[0])


@pytest.mark.parametrize("name", DRIPS)
def test_an_answer_that_drips_has_one_deadline(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Over head and body, however often a byte arrives."""
    monkeypatch.setattr(remote_engine, "TIMEOUT", 0.4)
    with endless(*DRIPS[name]) as (url, _), pytest.raises(ConfigError, match="Timeout") as told:
        asyncio.run(RemoteEngine(url, "m", ByteTokenizer()).generate([1], SAMPLING))
    assert not isinstance(told.value, AnswerInvalid)


def test_an_answer_without_end_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no answer of an engine, and at most so many bytes of it are read."""
    monkeypatch.setattr(remote_engine, "MAX_BYTES", 100_000)
    said = "more than 100000 bytes"
    with endless(*FLOOD, pause=0.0) as (url, _), pytest.raises(AnswerInvalid, match=said):
        asyncio.run(RemoteEngine(url, "m", ByteTokenizer()).generate([1], SAMPLING))
