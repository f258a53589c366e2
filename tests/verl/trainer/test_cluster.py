"""Joining a Ray cluster, and options for processes on its nodes."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path

import pytest

from verl.config import Config, cli
from verl.config.known import known_options
from verl.errors import ConfigError, ResourceError
from verl.ext.lora.choice import engine_takes_adapter
from verl.trainer.cluster import (
    absolute_paths,
    check_run_folder,
    config_for_actors,
    join_cluster,
    start_ray,
)

REQUIRED = ["data.train_files=t.parquet", "data.val_files=v.parquet"]


def config_with(*options: str) -> Config:
    return cli.compose([*REQUIRED, "actor_rollout_ref.model.path=m", *options])


def test_folders_of_models_get_absolute_paths_and_names_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers have another working directory than the driver; a hub name is not a folder."""
    (tmp_path / "m").mkdir()
    monkeypatch.chdir(tmp_path)
    found = config_for_actors(config_with("critic.model.path=org/name"), use_gpu=False)
    assert found.actor_rollout_ref.model.path == str(tmp_path / "m")
    assert found.critic.model.path == "org/name"
    assert config_for_actors(config_with(), use_gpu=False).critic.model.path is None


def test_named_files_get_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas read template and schedule on their nodes; each node checks the checkpoint."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/step").mkdir(parents=True)
    rollout = "actor_rollout_ref.rollout"
    named = ["template=mine.yaml", f"{rollout}.max_staleness=1", f"{rollout}.replay=run/schedule",
             "trainer.resume_mode=runs/step"]  # fmt: skip
    found, plain = (config_for_actors(config_with(*o), use_gpu=False) for o in (named, []))
    assert found.template == str(tmp_path / "mine.yaml") and plain.template == "search_r1"
    assert found.actor_rollout_ref.rollout.replay == str(tmp_path / "run/schedule")
    assert plain.actor_rollout_ref.rollout.replay is None
    assert found.trainer.resume_mode == str(tmp_path / "runs/step")
    assert plain.trainer.resume_mode == "disable"


def test_user_code_is_found_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every option that may name code in a file does so by an absolute path on the other nodes."""
    monkeypatch.chdir(tmp_path)
    code = [key for key, option in known_options().items() if option.limits.path == "code"]
    assert {"agent.name", "agent.tools", "actor_rollout_ref.rollout.name"} < set(code)
    config = config_with()
    for key in code:
        section, _, name = key.rpartition(".")
        owner = attrgetter(section)(config)
        is_list = isinstance(getattr(owner, name), list)
        setattr(owner, name, ["a.py:A"] if is_list else "a.py:A")
    found = absolute_paths(config)
    for key in code:
        expected = f"{tmp_path / 'a.py'}:A"
        assert attrgetter(key)(found) in (expected, [expected])


@pytest.mark.parametrize("address", ["here", "here:there"])
def test_a_wrong_address_is_an_error(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray raises another kind of error if the address has no host and port."""
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ResourceError, match=f"RAY_ADDRESS: got {address} "):
        join_cluster(address)


@pytest.mark.parametrize(
    ("raised", "expected"), [(Exception("timed out"), ResourceError), (OSError("full"), OSError)]
)
def test_a_ray_that_does_not_start_in_time_is_an_error_of_ours(
    raised: Exception, expected: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray raises a plain Exception after 30 s; whatever else it raises stays what it is."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def init(*_: object, **__: object) -> None:
        raise raised

    with pytest.raises(expected) as caught:
        start_ray(Config(), init)
    assert caught.value is raised or caught.value.__cause__ is raised


def test_a_driver_without_gpus_sends_the_adapter_that_gpu_engines_take() -> None:
    """On a GPU cluster, engines take the adapter, whatever devices the driver's machine has."""
    config = config_with("actor_rollout_ref.model.lora_rank=8", "trainer.device=auto")
    assert engine_takes_adapter(config_for_actors(config, use_gpu=True))
    assert not engine_takes_adapter(config_for_actors(config, use_gpu=False))


def test_a_ray_job_does_not_delete_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray deletes the copy of the checkout that a job runs in: folders in it are refused."""
    copy = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_1"
    copy.mkdir(parents=True)
    check_run_folder(config_with("trainer.default_local_dir=out"))
    monkeypatch.chdir(copy)
    check_run_folder(config_with(f"trainer.default_local_dir={tmp_path}/out"))
    with pytest.raises(ConfigError, match=r"trainer\.default_local_dir"):
        check_run_folder(config_with("trainer.default_local_dir=out"))
    with pytest.raises(ConfigError, match=r"trainer\.default_local_dir"):
        check_run_folder(config_with(f"trainer.default_local_dir={copy}/out"))
