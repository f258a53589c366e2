"""The judge of an evaluation."""

from pathlib import Path

import pytest

from search_r1.evaluation.options import EvaluationOptions
from search_r1.evaluation.running import open_judge
from verl.errors import ConfigError


def test_a_key_that_is_not_set_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty key variable is an error before the judge is called."""
    monkeypatch.setenv("NO_KEY", " ")
    options = EvaluationOptions(
        model="m", data=("q",), out=str(tmp_path),
        judge_url="http://127.0.0.1:9/v1", judge_model="m", judge_api_key_env="NO_KEY",
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"--judge-api-key-env: got NO_KEY, .*export NO_KEY=KEY"):
        open_judge(options)
