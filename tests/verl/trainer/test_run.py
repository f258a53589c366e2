"""What a run is told before anything of it starts."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from verl.config import Config
from verl.errors import ConfigError, Interrupted
from verl.monitor.tracking import Tracking
from verl.trainer import run as root
from verl.trainer.run import Prepared, prepare


@pytest.mark.parametrize("option", ["reward_model.name", "agent.tools"])
def test_own_code_that_is_missing_is_told_first(option: str, tmp_path: Path) -> None:
    """A reward or tool that is not there ends the run before its model or machine is looked at."""
    config = Config()
    config.trainer.default_local_dir = str(tmp_path / "run")
    missing = str(tmp_path / "nowhere.py:f")
    if option == "agent.tools":
        config.agent.tools = [missing]
    else:
        config.reward_model.name = missing
    with pytest.raises(ConfigError, match=r"nowhere\.py"):
        prepare(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_run_leaves_a_report_also_where_it_was_stopped(
    is_interrupted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what it logged until then; the reason of its end is still told."""
    config = Config()
    config.trainer.default_local_dir = str(tmp_path / "run")
    config.trainer.logger = ["jsonl"]

    @contextmanager
    def processes(prepared: Prepared, tracking: Tracking, restarts: object) -> Iterator[Any]:
        def fit() -> None:
            tracking.log({"timing_s/step": 2.0, "critic/score/mean": 0.5}, 1)
            if is_interrupted:
                raise Interrupted("out of time")

        yield SimpleNamespace(fit=fit)

    prepared = SimpleNamespace(config=config)
    monkeypatch.setattr(root, "prepare", lambda config: prepared)
    monkeypatch.setattr(root, "replace", lambda prepared, config: prepared)
    monkeypatch.setattr(root, "processes", processes)
    if is_interrupted:
        with pytest.raises(Interrupted, match="out of time"):
            root.run(config)
    else:
        root.run(config)
    assert "2.0 s a step" in (tmp_path / "run" / "report.md").read_text()
    assert (tmp_path / "run" / "report.html").is_file()
