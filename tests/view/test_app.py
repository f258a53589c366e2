"""The routes of the application."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from search_r1.view.app import OWN, PAGE, Runs, create_app
from search_r1.view.run import Run
from tests.runs import written as runs


@pytest.fixture
def client(run: Run) -> TestClient:
    return TestClient(create_app(Runs([run])))


def test_a_trajectory_by_token(client: TestClient, run: Run) -> None:
    """Token texts join to the segment's text; log-probs and versions are the recorded ones."""
    found = client.get("/api/trajectory?kind=train&step=1&line=2").json()
    written = runs.dialogue("Who is 100% _real_?", ["El Niño"], "El Niño 😀")
    assert found["accepted"] == ["El Niño"] and found["components"] == {"em": 0.5}
    for got, expected in zip(found["segments"], written.segments, strict=True):
        assert (got["origin"], got["text"], got["ids"]) == (
            expected.origin.name.lower(), expected.text, list(expected.ids))  # fmt: skip
        assert "".join(got["pieces"]) == expected.text
        assert len(got["pieces"]) == len(expected.ids)
        columns = {"log_probs": list(expected.log_probs)} if expected.log_probs else {}
        assert got["columns"] == columns
        assert got["weight_version"] == (0 if expected.log_probs else None)
    assert client.get("/api/trajectory?kind=train&step=1&line=3").status_code == 404
    assert client.get("/api/trajectory?kind=train&step=1&line=0&run=1").status_code == 404


def test_the_trainers_columns_are_shown_with_ratio_and_kl(
    folder: Path, open_run: Callable[[Path], Run]
) -> None:
    """A list as long as the ids is a column, and so is a single number of the trainer, repeated.

    Ratio and KL follow from the log-probs of trainer, engine and reference.
    """
    path = folder / "rollouts" / "step_00000001.jsonl"
    row = json.loads(path.read_text().splitlines()[2])
    policy = row["segments"][-1]
    policy["old_log_probs"] = [x + 0.5 for x in policy["log_probs"]]
    policy["old_log_probs"][0] = None
    policy["ref_log_probs"] = [x + 0.25 for x in policy["log_probs"]]
    policy["advantages"] = -2
    path.write_text(json.dumps(row) + "\n")
    columns = open_run(folder).trajectory("train", 1, 0)["segments"][-1]["columns"]
    assert columns["advantages"] == [-2] * len(policy["ids"])
    assert columns["kl"] == [None, *[0.25] * (len(policy["ids"]) - 1)]
    assert columns["ratio"][0] is None and columns["ratio"][1:] == pytest.approx(
        [1.6487212707] * (len(policy["ids"]) - 1))  # fmt: skip


def test_curves_of_several_runs(
    tmp_path: Path, folder: Path, open_run: Callable[[Path], Run]
) -> None:
    """Curves contain every run, also one without the metric."""
    other = runs.start_run(tmp_path / "other", template="short")
    runs.add_metrics(other, 7, **{"val/em": 0.5})
    client = TestClient(create_app(Runs([open_run(folder), open_run(other)])))
    assert client.get("/api/metrics").json() == ["a/b", "actor/entropy", "guard/health", "val/em"]
    found = client.get("/api/curves?name=val/em&name=a/b&name=none").json()
    assert found == {"val/em": [[[2], [1.0]], [[7], [0.5]]], "a/b": [[[1], [None]], [[], []]],
                     "none": [[[], []], [[], []]]}  # fmt: skip
    assert [run["name"] for run in client.get("/api/runs").json()] == ["run", "other"]


def test_one_question_over_the_steps(client: TestClient) -> None:
    """Trajectories of training and validation in the order of the steps, without tokens."""
    found = client.get("/api/question?uid=train.parquet%231").json()
    assert [(row["step"], row["line"]) for row in found] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert set(found[0]["segments"][0]) == {"origin", "text"}
    assert client.get("/api/question?uid=none").json() == []


@pytest.mark.parametrize("query", [
    "trajectories?page=0", "trajectories?size=100000", "trajectories?step_from=9999999999999999999",
    "trajectories?order=step;DROP", "trajectories?outcome=x", "curves", "curves?name=a&most=1",
    "curves?" + "&".join(["name=a"] * 65), "trajectory?kind=train&step=x&line=0",
    "trajectory?kind=train&step=99999999999999999999&line=0", "trajectories?words=" + "a" * 501,
    "trajectories?run=99999999999999999999",
])  # fmt: skip
def test_invalid_requests_are_refused(client: TestClient, query: str) -> None:
    """The status is a client error, never a server error."""
    assert client.get(f"/api/{query}").status_code in (404, 422)


def test_the_token_is_required_for_all_data_of_a_run(run: Run) -> None:
    """Every route of the API requires it; the page's own files contain no data and do not."""
    client = TestClient(create_app(Runs([run]), "secret"))
    for route in ("runs", "metrics", "curves?name=a", "trajectories", "question?uid=a",
                  "trajectory?kind=train&step=1&line=0"):  # fmt: skip
        answer = client.get(f"/api/{route}")
        assert answer.status_code == 401 and answer.headers["WWW-Authenticate"] == "Bearer"
        wrong = client.get(f"/api/{route}", headers={"Authorization": "Bearer secre"})
        assert wrong.status_code == 401
        admitted = client.get(f"/api/{route}", headers={"Authorization": "Bearer secret"})
        assert admitted.status_code == 200
    assert client.get("/").status_code == 200


def test_only_files_of_the_page_are_served(client: TestClient) -> None:
    """Their content security policy allows only the page's own scripts; POST is refused."""
    for path in PAGE:
        address = "/" if path.name == "page.html" else f"/{path.name}"
        answer = client.get(address)
        assert answer.content == path.read_bytes()
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'self'" in policy and "unsafe" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
    for path in ("/..%2fapp.py", "/app.py", "/../app.py", "/docs", "/openapi.json"):
        assert client.get(path).status_code == 404
    assert client.post("/api/runs").status_code == 405


def test_the_page_inserts_data_as_text_only() -> None:
    """No script of the page creates HTML, code or addresses from strings, or loads anything."""
    for path in (path for path in PAGE if path.suffix == ".js"):
        text = path.read_text(encoding="utf-8")
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(",
                     "new Function", "srcdoc", "DOMParser", "https://"):  # fmt: skip
            assert word not in text, (path.name, word)
    html = (OWN / "page.html").read_text(encoding="utf-8")
    assert "//" not in html.replace("<!-- ", "") and "style=" not in html


def test_hostile_texts_come_as_json(client: TestClient) -> None:
    """An answer with hostile texts is JSON, which no browser interprets as a page."""
    answer = client.get("/api/trajectory?kind=train&step=2&line=2")
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.json()["question"] == runs.HOSTILE


BODIES = [
    '{"step": NaN, "line": 0}', '{"step": Infinity, "line": 0}', '{"step": 1, "line": -Infinity}',
    '{"step": 1e999, "line": 0}', '{"step": 1, "line": ' + "9" * 5000 + "}", '{"step": -1}',
    '{"step": 1, "line": 0, "text": "\\ud800"}',
    '{"step": 1, "line": 0, "\\udfff": 1, "run": NaN}',
    '{"step": 1, "line": 0, "documents": [[{"text": NaN}]]}', "NaN", "[NaN]", "null", "", "{",
    "\x00",
    "[" * 20_000, '{"step": true, "line": {}}',
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_a_replay_of_no_valid_request_is_refused_as_json(client: TestClient, body: str) -> None:
    """The answer can be encoded whatever the request contains."""
    headers = {"Content-Type": "application/json"}
    answer = client.post("/api/replay", content=body.encode(), headers=headers)
    assert answer.status_code == 422
    assert all(set(problem) == {"loc", "msg", "type"} for problem in answer.json()["detail"])


@pytest.mark.parametrize("value", ["NaN", "1e999", "-1", "9" * 5000, "%ff", "%ed%a0%80", ""])
@pytest.mark.parametrize(
    "query", ["trajectory?kind=train&line=0&step=", "trajectory?kind=train&step=1&line=0&run=",
              "curves?name=a&most=", "trajectories?run=", "question?uid=1&run="],
)  # fmt: skip
def test_numbers_of_a_query_are_refused_as_json(client: TestClient, query: str, value: str) -> None:
    """An address has no NaN either, and an integer fits into the index."""
    answer = client.get(f"/api/{query}{value}")
    assert answer.status_code in (404, 422) and "detail" in answer.json()
