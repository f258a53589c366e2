"""Secrets of the environment and of addresses are in nothing that a run writes, logs or shows."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import yaml

from search_r1.plain import PlainFormatter
from search_r1.search.client import RetrievalClient
from tests.test_end_to_end import ROOT, command_of, start_world
from verl.checkpoint.resume import identity
from verl.config import Config, cli
from verl.errors import ConfigError, PreflightError, ToolError, explain, masked
from verl.logs import MaskedFormatter
from verl.single_controller.actors import ActorHost, RayWorkerGroup
from verl.trainer import main_ppo
from verl.training.network import forwarded

VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "RETRIEVER_TOKEN",
             "OPENAI_API_KEY", "SERPAPI_API_KEY", "AGENT_TOKEN")  # fmt: skip
PLANTED = {name: f"plantedsecret{number}" for number, name in enumerate(VARIABLES)}
PASSWORD = "plantedpassword"
URL = f"http://ann:{PASSWORD}@127.0.0.1:9/v1"


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
    """And nothing else."""
    assert masked(text) == expected
    assert masked(masked(text)) == expected


@pytest.mark.parametrize("kind", [ConfigError, ToolError])
def test_no_error_shows_a_password(kind: type[ConfigError] | type[ToolError]) -> None:
    """Whoever words it; a list of several neither."""
    error = kind(explain("retriever.url", URL, "x", "y"))
    assert PASSWORD not in str(error) + repr(error) + str(PreflightError([error]))


@pytest.mark.parametrize("formatter", [MaskedFormatter, PlainFormatter])
def test_no_log_line_shows_a_password(formatter: type[logging.Formatter]) -> None:
    """Of another library's logger neither, nor in its traceback."""
    try:
        raise OSError(f"cannot reach {URL}")
    except OSError:
        record = logging.LogRecord("x", 30, "f", 1, "tried %s", (URL,), sys.exc_info())
    text = formatter("%(message)s").format(record)
    assert PASSWORD not in text and text.count("***@127.0.0.1") == 2


def test_no_saved_configuration_holds_a_password(tmp_path: Path) -> None:
    """In the folder, in a checkpoint, and in what a client says of itself."""
    for name in ("train", "val"):
        (tmp_path / name).touch()
    config = Config()
    config.data.train_files, config.data.val_files = str(tmp_path / "train"), str(tmp_path / "val")
    config.actor_rollout_ref.model.path = "m"
    config.retriever.url = config.reward_model.judge.url = URL
    saved = cli.write_resolved(config, tmp_path).read_text()
    texts = [saved, str(identity(config, {})), repr(RetrievalClient(URL))]
    assert all("***@127.0.0.1" in text and PASSWORD not in text for text in texts)


@pytest.fixture
def ray_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where Ray logs, with secrets in the environment of what starts it."""
    folder = Path(tempfile.mkdtemp(prefix="r"))  # sockets have short paths
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


class Environment:
    """What a process of a run sees."""

    def get(self, name: str) -> str | None:
        return os.environ.get(name)


def leaks(*folders: Path) -> list[str]:
    """Files with a secret in name or content."""
    secrets = [value.encode() for value in (*PLANTED.values(), PASSWORD)]
    found = []
    for path in (path for folder in folders for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes() + str(path).encode()
        found += [f"{path}: {secret!r}" for secret in secrets if secret in content]
    return found


def shown() -> list[str]:
    """Command lines with a secret."""
    lines = [" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])]
    return [line for line in lines if any(x in line for x in (*PLANTED.values(), PASSWORD))]


def test_an_actor_has_the_hubs_token_and_ray_logs_it_nowhere(ray_folder: Path) -> None:
    """It has come before anything else is asked of an actor."""
    ray.init("local", include_dashboard=False, num_cpus=1, logging_level=logging.ERROR)
    try:
        unset = {"HF_TOKEN": ""}  # as on a node of another Ray
        environments = [forwarded(os.environ), forwarded(os.environ) | unset]
        options = [ActorHost.options(num_cpus=0, runtime_env={"env_vars": e}) for e in environments]
        group = RayWorkerGroup(options, "rank", ConfigError)
        ray.get([host.build.remote(Environment) for host in group.hosts])
        assert group.call("get", "HF_TOKEN") == [PLANTED["HF_TOKEN"]] * 2
        assert shown() == []
    finally:
        ray.shutdown()
    assert any(ray_folder.rglob("*.log"))
    assert leaks(ray_folder) == []


def test_a_real_run_leaves_no_secret(ray_folder: Path, tmp_path: Path) -> None:
    """Neither in its folder, Ray's, its log, nor its command lines."""
    preset: dict[str, Any] = {
        "defaults": ["ppo_trainer", "_self_"],
        "reward_model": {"judge": {"url": URL}},
        "actor_rollout_ref": {"rollout": {"name": "transformers"}},
    }
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(preset))
    out, log = tmp_path / "run", tmp_path / "log"
    with start_world(tmp_path / "world") as world, log.open("w") as file:
        command = command_of(world, out, "algorithm.adv_estimator=grpo",
                             "trainer.n_gpus_per_node=1", "trainer.total_training_steps=1",
                             "trainer.save_freq=1", "-cd", str(tmp_path), "-cn", "own")  # fmt: skip
        run = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)
        while run.poll() is None:
            assert shown() == []
            time.sleep(0.3)
    assert run.returncode == 0, log.read_text()[-6000:]
    assert leaks(ray_folder, out) == []
    assert not any(secret in log.read_text() for secret in (*PLANTED.values(), PASSWORD))
    for saved in ("config.yaml", "global_step_1/trainer_state.json"):
        assert "***@127.0.0.1" in (out / saved).read_text()


def test_a_refused_run_shows_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A retriever's address with a password beside its token ends in one line."""
    monkeypatch.setenv("RETRIEVER_TOKEN", PLANTED["RETRIEVER_TOKEN"])
    arguments = ["data.train_files=x", "data.val_files=x", "actor_rollout_ref.model.path=x",
                 f"retriever.url={URL}", f"trainer.default_local_dir={tmp_path}"]  # fmt: skip
    assert main_ppo.main(arguments) == 2
    text = capsys.readouterr().err
    assert "http://***@127.0.0.1:9/v1 with a user" in text and text.count("\n") == 1
    assert not any(secret in text for secret in (*PLANTED.values(), PASSWORD))
