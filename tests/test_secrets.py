"""Secrets of the environment and of addresses are never written, logged or shown.

`tests/test_end_to_end.py` looks for them in the files of a real run.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from pathlib import Path

import pytest
import ray

from search_r1.plain import PlainFormatter
from search_r1.retrieval.client import RetrievalClient
from tests.planted import PASSWORD, PLANTED, URL, leaks, shown
from verl.config import Config, cli
from verl.errors import ConfigError, PreflightError, ToolError, explain, redact
from verl.ext.resume import identity
from verl.logs import MaskedFormatter
from verl.single_controller.actors import ActorHost, RayWorkerGroup
from verl.trainer import main_ppo
from verl.training.network import forwarded_variables


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://ann:pw@host:1/x", "http://***@host:1/x"),
        ("at https://ann@host and http://h2/a@b", "at https://***@host and http://h2/a@b"),
        ("http://a:p@ss@h,http://b:q@i/r", "http://***@h,http://***@i/r"),
        ("http://h/x?api_key=1&q=a@b&token=2#f", "http://h/x?api_key=***&q=a@b&token=***#f"),
        ("postgres://u:p%40@h/d", "postgres://***@h/d"),
        ("mail ann@host, 3://4", "mail ann@host, 3://4"),
        ("http://[::1]:8000/retrieve", "http://[::1]:8000/retrieve"),
    ],
)
def test_passwords_of_addresses_are_masked(text: str, expected: str) -> None:
    """Passwords and keys are masked, and nothing else is."""
    assert redact(text) == expected
    assert redact(redact(text)) == expected


@pytest.mark.parametrize("kind", [ConfigError, ToolError])
def test_no_error_shows_a_password(kind: type[ConfigError] | type[ToolError]) -> None:
    """No error message has a password, nor has a list of several errors."""
    error = kind(explain("retriever.url", URL, "x", "y"))
    assert PASSWORD not in str(error) + repr(error) + str(PreflightError([error]))


@pytest.mark.parametrize("formatter", [MaskedFormatter, PlainFormatter])
def test_no_log_line_shows_a_password(formatter: type[logging.Formatter]) -> None:
    """No log line has one, whatever library's logger wrote it, nor has its traceback."""
    try:
        raise OSError(f"cannot reach {URL}")
    except OSError:
        record = logging.LogRecord("x", 30, "f", 1, "tried %s", (URL,), sys.exc_info())
    text = formatter("%(message)s").format(record)
    assert PASSWORD not in text and text.count("***@127.0.0.1") == 2


def test_no_saved_configuration_holds_a_password(tmp_path: Path) -> None:
    """The run's folder, checkpoints and the description of a client have no password."""
    for name in ("train", "val"):
        (tmp_path / name).touch()
    config = Config()
    config.data.train_files, config.data.val_files = str(tmp_path / "train"), str(tmp_path / "val")
    config.actor_rollout_ref.model.path = "m"
    config.retriever.url = config.reward_model.judge["url"] = URL
    saved = cli.write_resolved(config, tmp_path).read_text()
    texts = [saved, str(identity(config, {})), repr(RetrievalClient(URL))]
    assert all("***@127.0.0.1" in text and PASSWORD not in text for text in texts)


def test_an_actor_has_the_hubs_token_and_ray_logs_it_nowhere(
    ray_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token arrives before any other call of an actor; here the hosted module is `os`."""
    for name, value in {**PLANTED, "RAY_TMPDIR": str(ray_folder)}.items():
        monkeypatch.setenv(name, value)
    ray.init("local", include_dashboard=False, num_cpus=1, logging_level=logging.ERROR)
    try:
        unset = {"HF_TOKEN": ""}  # as on a node of another Ray
        environments = [forwarded_variables(os.environ), forwarded_variables(os.environ) | unset]
        options = [ActorHost.options(num_cpus=0, runtime_env={"env_vars": e}) for e in environments]
        group = RayWorkerGroup(options, "rank", ConfigError)
        ray.get([host.build.remote(importlib.import_module, "os") for host in group.hosts])
        assert group.call("getenv", "HF_TOKEN") == [PLANTED["HF_TOKEN"]] * 2
        assert shown() == []
    finally:
        ray.shutdown()
    assert any(ray_folder.rglob("*.log"))
    assert leaks(ray_folder) == []


def test_a_refused_run_shows_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A retriever address with a password next to its token ends in one line without secrets."""
    monkeypatch.setenv("RETRIEVER_TOKEN", PLANTED["RETRIEVER_TOKEN"])
    arguments = ["data.train_files=x", "data.val_files=x", "actor_rollout_ref.model.path=x",
                 f"retriever.url={URL}", f"trainer.default_local_dir={tmp_path}"]  # fmt: skip
    assert main_ppo.main(arguments) == 2
    text = capsys.readouterr().err
    assert "http://***@127.0.0.1:9/v1 with a user" in text and text.count("\n") == 1
    assert not any(secret in text for secret in (*PLANTED.values(), PASSWORD))
