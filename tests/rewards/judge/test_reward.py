"""The LLM judge with a real server that may fail or hang."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from search_r1.rewards import JudgeOptions, RewardInput, build_batch_reward, build_judge
from tests.rewards.judge.server import JudgeServer, Reply, judge_server, slowly

OPTIONS = JudgeOptions(model="m", max_retries=2, first_pause=0.0, timeout=5.0, max_concurrency=4)


def dialogue(answer: str | None, gold: str = "Paris", question: str = "Capital?") -> RewardInput:
    """Build a dialogue with this answer, or without one."""
    text = "hm" if answer is None else f"<answer>{answer}</answer>"
    return RewardInput([text], [("policy", text)], [gold], question=question)


def by_content(_: int, body: dict[str, Any]) -> Reply:
    """Reply yes if the message contains `capital city`."""
    return "yes" if "capital city" in body["messages"][0]["content"] else "no"


def at(server: JudgeServer, **options: Any) -> JudgeOptions:
    return replace(OPTIONS, url=server.url, **options)


def test_each_dialogue_gets_its_own_verdict() -> None:
    """Exact matches and missing answers are not sent; equal messages are sent once."""
    answers = ["Paris", "the capital city", "Rome", None, "", "the capital city"]
    with judge_server(by_content) as server:
        out = build_judge(at(server, api_key="k"))([dialogue(a) for a in answers])
    assert [o.score for o in out] == [1, 1, 0, 0, 0, 1]
    assert [o.components["judge_asked"] for o in out] == [0, 1, 1, 0, 0, 1]
    assert [o.components["em"] for o in out] == [1, 0, 0, 0, 0, 0]
    assert [o.components["answered"] for o in out] == [1, 1, 1, 0, 1, 1]
    assert not any(o.components["judge_failed"] for o in out)
    assert len(server.requests) == 2
    assert {h["authorization"] for h in server.headers} == {"Bearer k"}
    assert server.requests[0]["model"] == "m" and server.requests[0]["temperature"] == 0


def test_a_batch_is_judged_at_once_within_the_bound() -> None:
    """At most max_concurrency requests run concurrently."""
    with judge_server(lambda n, body: slowly(0.05, "yes")) as server:
        out = build_judge(at(server))([dialogue(f"a{i}") for i in range(12)])
    assert all(o.score == 1 for o in out) and len(server.requests) == 12
    assert 1 < server.max_concurrent <= 4


def test_one_client_serves_all_batches_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Certificates are read once, and batches at once (evaluations) keep the bound together."""
    clients = []
    make_client = openai.DefaultHttpxClient
    monkeypatch.setattr(
        openai, "DefaultHttpxClient", lambda **k: clients.append(1) or make_client(**k)
    )
    with judge_server(lambda n, body: slowly(0.02, "yes")) as server:
        judge = build_judge(at(server))
        judge.check()
        with ThreadPoolExecutor(24) as threads:
            list(threads.map(lambda i: judge([dialogue(f"a{i}")]), range(24)))
    assert len(clients) == 1 and len(server.requests) == 25
    assert 1 < server.max_concurrent <= OPTIONS.max_concurrency


def test_keys_of_the_environment_stay_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of other services in the environment are not sent to the judge."""
    for name in ("OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID", "HF_TOKEN"):
        monkeypatch.setenv(name, "planted")
    with judge_server(lambda n, body: 307 if n == 0 else "yes") as server:
        build_judge(at(server))([dialogue("x")])
        build_judge(at(server))([dialogue("x")])
    assert len(server.requests) == 2 and "planted" not in str(server.headers)
    assert not any("authorization" in headers for headers in server.headers)


TROUBLES = (500, 429, "maybe", b"{no json", b"[" * 100_000, b'{"choices": []}', b"7", None)


@pytest.mark.parametrize("trouble", TROUBLES)
def test_trouble_passes_with_another_try(trouble: Reply) -> None:
    """Errors, invalid responses, replies without a verdict and timeouts are retried."""
    with judge_server(lambda n, body: trouble if n == 0 else "yes") as server:
        (out,) = build_judge(at(server, timeout=0.3))([dialogue("x")])
    assert (out.score, out.components["judge_failed"]) == (1.0, 0.0)
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("trouble", "num_tries"), [(503, 3), ("I think yes", 3), (401, 1), (None, 3)]
)
def test_without_a_verdict_the_rule_counts(trouble: Reply, num_tries: int) -> None:
    """Without a verdict the score is exact match, and judge_failed is set."""
    with judge_server(lambda n, body: trouble) as server:
        wrong, right = build_judge(at(server, timeout=0.2))([dialogue("x"), dialogue("Paris")])
    assert (wrong.score, wrong.components["judge_failed"]) == (0.0, 1.0)
    assert (right.score, right.components["judge_failed"]) == (1.0, 0.0)
    assert len(server.requests) == num_tries


def test_a_judge_that_is_down_does_not_hold_the_batch_up() -> None:
    """After max_concurrency failures in a row the rest of the batch fails without a request."""
    options = {"max_retries": 0, "max_concurrency": 1}
    with judge_server(lambda n, body: 500 if n == 0 else "yes") as server:
        judge = build_judge(at(server, **options))
        first = judge([dialogue(f"a{i}") for i in range(20)])
        assert len(server.requests) == 1
        assert sum(o.components["judge_failed"] for o in first) == 20
        assert judge([dialogue("a1")])[0].score == 1.0


def test_verdicts_outlive_the_process(tmp_path: Path) -> None:
    """Cached verdicts are found by other processes, but not for another model or answer."""
    path = str(tmp_path / "new" / "cache.sqlite")
    code = (
        "import sys; from search_r1.rewards import *\n"
        "text = '<answer>the capital city</answer>'\n"
        "given = RewardInput([text], [], ['Paris'], question='Capital?')\n"
        "judge = build_judge(JudgeOptions(sys.argv[1], 'm', cache_path=sys.argv[2]))\n"
        "print(judge([given])[0].score)"
    )
    with judge_server(by_content) as server:
        command = [sys.executable, "-c", code, server.url, path]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert (done.stdout.strip(), len(server.requests)) == ("1.0", 1)
        options = at(server, cache_path=path)
        assert build_judge(options)([dialogue("the capital city")])[0].score == 1.0
        assert len(server.requests) == 1
        build_judge(replace(options, model="other"))([dialogue("the capital city")])
        build_judge(options)([dialogue("Rome")])
        assert len(server.requests) == 3


def test_failures_are_not_kept(tmp_path: Path) -> None:
    """Failed verdicts are not cached, so the next batch asks again."""
    with judge_server(lambda n, body: 500 if n < 3 else "yes") as server:
        judge = build_judge(at(server, cache_path=str(tmp_path / "c")))
        assert [judge([dialogue("x")])[0].score for _ in range(3)] == [0, 1, 1]
        assert len(server.requests) == 4


def test_a_file_that_is_no_cache_is_refused(tmp_path: Path) -> None:
    """The message names the option before a run starts."""
    (tmp_path / "c").write_text("something else, long enough to be no database at all" * 9)
    with pytest.raises(ValueError, match=r"judge\.cache_path"):
        build_judge(replace(OPTIONS, cache_path=str(tmp_path / "c")))


def test_a_judge_that_does_not_answer_is_found_before_the_run() -> None:
    """The check sends one test question and raises if there is no verdict."""
    with (
        judge_server(lambda n, body: 404) as server,
        pytest.raises(ValueError, match="status 404"),
    ):
        build_judge(at(server)).check()
    with pytest.raises(ValueError, match="http://127"):
        build_judge(replace(OPTIONS, url="http://127.0.0.1:9/v1", max_retries=0)).check()
    with judge_server(lambda n, body: "no") as server:
        build_judge(at(server)).check()


def test_the_judge_is_a_part_of_a_weighted_sum() -> None:
    """In a weighted sum the judge scores the whole batch, and its components are kept."""
    with judge_server(by_content) as server:
        judge = build_judge(at(server))
        rule = build_batch_reward("em", weights={"llm_judge": 0.5, "f1": 2.0}, judge=judge)
        right, half = rule([dialogue("the capital city"), dialogue("in Paris")])
    assert right.score == pytest.approx(0.5)
    assert half.score == pytest.approx(2.0 * 2 / 3)
    assert right.components["llm_judge_score"] == 1.0 and half.components["judge_failed"] == 0.0
    with pytest.raises(ValueError, match="llm_judge"):
        build_batch_reward("llm_judge")


def refusing(*fields: str, form: str = "openai") -> Any:
    """Return a judge that refuses some fields as OpenAI's newest models do, and says yes else."""

    def reply(_: int, body: dict[str, Any]) -> Reply:
        for field in fields:
            if field in body:
                other = " Use 'max_completion_tokens' instead." * (field == "max_tokens")
                message = f"Unsupported parameter: '{field}'.{other}"
                error = {"message": message, "param": field, "code": "unsupported_parameter"}
                text = json.dumps({"error": error}) if form == "openai" else message
                return (400, text.encode())
        return "yes"

    return reply


@pytest.mark.parametrize("form", ["openai", "text"])
@pytest.mark.parametrize(
    "fields", [("max_tokens",), ("temperature",), ("max_tokens", "temperature")]
)
def test_a_field_that_the_judge_refuses_is_left_out(
    fields: tuple[str, ...], form: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Later requests and batches have the other field; the log says so once per field."""
    with judge_server(refusing(*fields, form=form)) as server:
        judge = build_judge(at(server, max_tokens=77, max_concurrency=1))
        judge.check()
        num_asked = len(server.requests)
        assert [o.score for o in judge([dialogue("x"), dialogue("y")])] == [1.0, 1.0]
    assert num_asked == 1 + len(fields) and len(server.requests) == num_asked + 2
    last = server.requests[-1]
    assert ("temperature" in last) is ("temperature" not in fields)
    limit = "max_completion_tokens" if "max_tokens" in fields else "max_tokens"
    assert {name: last[name] for name in last if "tokens" in name} == {limit: 77}
    assert sum("refuses a field" in message for message in caplog.messages) == len(fields)


def test_a_batch_at_once_adapts_as_well() -> None:
    """Concurrent requests that were all refused are all sent again."""
    with judge_server(refusing("max_tokens", "temperature")) as server:
        out = build_judge(at(server))([dialogue(f"a{i}") for i in range(12)])
    assert [o.score for o in out] == [1.0] * 12


def test_the_body_replaces_adds_and_removes_fields(tmp_path: Path) -> None:
    """Null removes a field; verdicts are cached for this body; its fields are not adapted."""
    body = {"max_tokens": None, "max_completion_tokens": 2000, "temperature": 1, "seed": 3}
    with judge_server(lambda n, sent: "yes") as server:
        options = at(server, body=body, cache_path=str(tmp_path / "c"))
        for _ in range(2):
            assert build_judge(options)([dialogue("x")])[0].score == 1.0
        build_judge(replace(options, body={}))([dialogue("x")])
    first, plain = server.requests
    assert {name: first.get(name) for name in body} == body and "max_tokens" not in first
    assert (plain["max_tokens"], plain["temperature"]) == (16, 0)
    with judge_server(refusing("temperature")) as server:
        with pytest.raises(ValueError, match=r"status 400.*judge\.body"):
            build_judge(at(server, body=body)).check()
        assert len(server.requests) == 1


@pytest.mark.parametrize(
    "body", [{"messages": []}, {"model": "x"}, {"stream": True}, {"x": float("nan")}, {"x": {1}},
             {"max_token": None}]
)  # fmt: skip
def test_a_body_that_cannot_be_sent_is_refused(body: dict[str, Any]) -> None:
    """Fields that make the request, values that JSON does not have, null for an absent field."""
    with pytest.raises(ValueError, match=r"judge\.body: got "):
        replace(OPTIONS, body=body)


def test_a_reply_that_was_cut_says_so() -> None:
    """A model that thinks first needs more tokens; trying again does not help."""
    cut = {"choices": [{"message": {"content": None}, "finish_reason": "length"}]}
    with judge_server(lambda n, body: json.dumps(cut).encode()) as server:
        with pytest.raises(ValueError, match=r"judge\.max_tokens"):
            build_judge(at(server)).check()
        assert len(server.requests) == 1


def test_other_bad_requests_are_failures_at_once() -> None:
    """An error that names no field of ours is not answered with another request."""
    refused = (400, b'{"error": {"message": "context too long", "param": "messages"}}')
    with judge_server(lambda n, body: refused) as server:
        (out,) = build_judge(at(server))([dialogue("x")])
    assert out.components["judge_failed"] == 1.0 and len(server.requests) == 1
