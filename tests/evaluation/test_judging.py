"""The judge of an evaluation."""

from pathlib import Path

import pytest

from search_r1.evaluation.dialogues import open_judge
from search_r1.evaluation.options import EvaluationOptions
from tests.rewards.judge.server import judge_server
from verl.errors import ConfigError


def test_a_key_that_is_not_set_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty key variable is an error before the judge is called."""
    monkeypatch.setenv("NO_KEY", " ")
    options = EvaluationOptions(
        model="m", data=("q",), out=str(tmp_path),
        judge_url="http://127.0.0.1:9/v1", judge_model="m", judge_api_key_env="NO_KEY",
    )  # fmt: skip
    with pytest.raises(ConfigError, match="--judge-api-key-env"):
        open_judge(options)


@pytest.mark.parametrize("body", ["{", "[1]", "3", "max_tokens"])
def test_a_body_that_is_no_object_is_refused(body: str) -> None:
    """Before the model is loaded."""
    with pytest.raises(ConfigError, match="--judge-body: got"):
        EvaluationOptions(model="m", data=("q",), out="o", judge_body=body)


def test_the_body_reaches_the_judge(tmp_path: Path) -> None:
    """Its fields replace ours in an evaluation, too."""
    with judge_server(lambda n, sent: "yes") as server:
        body = '{"max_tokens": null, "max_completion_tokens": 2000}'
        options = EvaluationOptions(
            model="m", data=("q",), out=str(tmp_path), judge_url=server.url, judge_model="m",
            judge_body=body,
        )  # fmt: skip
        assert open_judge(options) is not None
    [sent] = server.requests
    assert sent["max_completion_tokens"] == 2000 and "max_tokens" not in sent
