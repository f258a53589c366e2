"""Checks of a Ray cluster and its nodes, as far as one machine allows."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.exceptions import RayError

from verl.agent.environment import Environment, no_tools
from verl.config import Config, cli
from verl.errors import ConfigError, PreflightError, ResourceError
from verl.rollout.interface import engine_takes_adapter
from verl.trainer import cluster
from verl.trainer.cluster import (
    check_run_folder,
    config_for_actors,
    file_problems,
    inspect_node,
    join_cluster,
    package_problems,
    probe_file,
    shared_memory_problems,
    wait_for_file,
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
    with probe_file(tmp_path / "run") as probe:
        monkeypatch.chdir("/")
        assert file_problems(found, probe) == []


@pytest.mark.parametrize("address", ["here", "here:there"])
def test_a_wrong_address_is_an_error(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray raises another kind of error if the address has no host and port."""
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ResourceError, match=f"RAY_ADDRESS: got {address} .*expected a running Ray"):
        join_cluster(address)


def test_a_driver_without_gpus_sends_the_adapter_that_gpu_engines_take() -> None:
    """On a GPU cluster, engines take the adapter, whatever devices the driver's machine has."""
    config = config_with("actor_rollout_ref.model.lora_rank=8", "trainer.device=auto")
    assert engine_takes_adapter(config_for_actors(config, use_gpu=True))
    assert not engine_takes_adapter(config_for_actors(config, use_gpu=False))


def test_one_folder_for_all_is_no_problem(tmp_path: Path) -> None:
    """The driver's file is seen, another file can be written, and both are removed."""
    with probe_file(tmp_path / "run") as probe:
        assert file_problems(config_with(), probe) == []
    assert list((tmp_path / "run").iterdir()) == []


def test_an_unshared_folder_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that does not see the driver's file has a different folder; the error names it."""
    monkeypatch.setattr(cluster, "FILE_TIMEOUT_S", 0.0)
    with probe_file(tmp_path / "run") as probe:
        elsewhere = tmp_path / "elsewhere" / probe.name
        elsewhere.parent.mkdir()
        [problem] = file_problems(config_with(), elsewhere)
        assert f"{elsewhere.parent}, which is missing or a different folder there" in str(problem)


def test_a_late_file_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Network file systems show a new file to other nodes after seconds."""
    late = threading.Timer(0.3, (tmp_path / "late").touch)
    late.start()
    assert wait_for_file(tmp_path / "late")
    monkeypatch.setattr(cluster, "FILE_TIMEOUT_S", 0.3)
    start = time.monotonic()
    assert not wait_for_file(tmp_path / "never")
    assert time.monotonic() - start >= 0.3


def test_each_node_must_see_the_checkpoint_to_resume_from(tmp_path: Path) -> None:
    """A path that only the driver has would fail in the ranks, after everything was loaded."""
    step = tmp_path / "global_step_3"
    with probe_file(tmp_path / "run") as probe:
        config = config_with(f"trainer.resume_mode={step}")
        [problem] = file_problems(config, probe)
        assert "trainer.resume_mode" in str(problem) and str(step) in str(problem)
        step.mkdir()
        assert file_problems(config, probe) == []


def test_each_node_must_see_the_folder_of_the_weights(tmp_path: Path) -> None:
    """The path is absolute, whatever the driver's working directory."""
    url = "actor_rollout_ref.rollout.url=http://a:1"
    config = config_with(url, f"actor_rollout_ref.rollout.weights_dir={tmp_path}/weights")
    with probe_file(tmp_path / "run") as probe:
        [problem] = file_problems(config, probe)
        assert f"rollout.weights_dir: got {tmp_path}/weights (no such folder)" in str(problem)
        (tmp_path / "weights").mkdir()
        assert file_problems(config, probe) == []
    config = config_with(url, "actor_rollout_ref.rollout.weights_dir=weights")
    found = config_for_actors(config, use_gpu=False).actor_rollout_ref.rollout.weights_dir
    assert found == str(Path("weights").absolute())


def test_the_drivers_versions_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the driver's node is part of the run; otherwise its versions do not matter."""
    config = config_with(f"trainer.default_local_dir={tmp_path}/run")
    context = SimpleNamespace(get_node_id=lambda: "own")
    monkeypatch.setattr(cluster.ray, "get_runtime_context", lambda: context)
    older = {**cluster.installed_versions(), "torch": "1.0"}
    monkeypatch.setattr(cluster, "_start_inspection", lambda *_: cluster.NodeReport((), older))
    monkeypatch.setattr(cluster.ray, "get", lambda report: report)
    cluster.check_nodes(config, no_tools, {"b": "10.0.0.2"})
    message = r"node 10\.0\.0\.2: got torch 1\.0, expected .*node 10\.0\.0\.1"
    with pytest.raises(PreflightError, match=message):
        cluster.check_nodes(config, no_tools, {"own": "10.0.0.1", "b": "10.0.0.2"})


def test_the_problems_of_all_nodes_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All nodes are inspected before any result is awaited; a failed check does not hide others."""
    started: list[str] = []
    monkeypatch.setattr(cluster, "_start_inspection", lambda node, *_: started.append(node) or node)

    def result(node: str) -> cluster.NodeReport:
        assert started == ["a", "b", "c"]
        if node == "c":
            return cluster.NodeReport((ConfigError("no tool"),), {})
        raise RayError(f"Traceback\nno verl on {node}")

    monkeypatch.setattr(cluster.ray, "get", result)
    context = SimpleNamespace(get_node_id=lambda: "own")
    monkeypatch.setattr(cluster.ray, "get_runtime_context", lambda: context)
    config = config_with(f"trainer.default_local_dir={tmp_path}/run")
    with pytest.raises(PreflightError) as caught:
        cluster.check_nodes(config, no_tools, {"a": "1.1", "b": "1.2", "c": "1.3"})
    starts = [str(problem).partition(", expected")[0] for problem in caught.value.problems]
    assert starts == [
        "node 1.1: got no verl on a", "node 1.2: got no verl on b", "node 1.3: no tool",
    ]  # fmt: skip


def test_other_versions_on_a_node_are_reported() -> None:
    """Ray checks its own version and Python's; torch, transformers and vLLM must agree too."""
    versions = {"torch": "2.13.0", "vllm": "0.32.0"}
    assert package_problems({"a": versions, "b": dict(versions)}) == []
    first, second = map(str, package_problems({"a": versions, "b": {"torch": "2.11.0"}}))
    assert first.startswith("node b: got torch 2.11.0, expected 2.13.0, as on node a")
    assert second.startswith("node b: got vllm missing, expected 0.32.0, as on node a")


def test_shared_memory_must_hold_the_weights(tmp_path: Path) -> None:
    """Too little is reported before a model is loaded; an adapter needs no space."""
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(1 << 43)  # a sparse file, which takes no space
    config = config_with(f"actor_rollout_ref.model.path={tmp_path}", "trainer.device=cuda")
    [problem] = shared_memory_problems(config)
    assert "8192.0 GiB for the weights" in str(problem)
    section = config.actor_rollout_ref
    stale = replace(section, rollout=replace(section.rollout, max_staleness=1))
    [problem] = shared_memory_problems(replace(config, actor_rollout_ref=stale))
    assert "16384.0 GiB for the weights" in str(problem)  # engines still read the previous version
    adapted = replace(section, model=replace(section.model, lora_rank=8))
    assert shared_memory_problems(replace(config, actor_rollout_ref=adapted)) == []


def test_a_ray_job_does_not_delete_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray deletes the copy of the checkout that a job runs in: folders in it are refused."""
    copy = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_1"
    copy.mkdir(parents=True)
    check_run_folder(config_with("trainer.default_local_dir=out"))
    monkeypatch.chdir(copy)
    check_run_folder(config_with(f"trainer.default_local_dir={tmp_path}/out"))
    with pytest.raises(ConfigError, match=r"trainer\.default_local_dir"):
        check_run_folder(config_with("trainer.default_local_dir=out"))
    with pytest.raises(ConfigError, match="in Ray's copy of the job"):
        check_run_folder(config_with(f"trainer.default_local_dir={copy}/out"))


def test_a_tool_that_is_missing_on_a_node_is_reported_as_such(tmp_path: Path) -> None:
    """It is not reported as an environment without verl, as an error of the check would be."""

    def missing(config: Config) -> Environment:
        raise ConfigError("agent.tools: got /own.py, expected a Python file that exists")

    with probe_file(tmp_path / "run") as probe:
        report = inspect_node._function(config_with(), missing, probe, {})
    assert "agent.tools: got /own.py" in "".join(map(str, report.problems))
    assert "torch" in report.packages
