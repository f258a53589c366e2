"""Checks of a run's nodes, as far as one machine allows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayError

from tests.verl.trainer.test_cluster import config_with
from verl.agent.environment import Environment, no_tools
from verl.config import Config
from verl.errors import ConfigError, PreflightError
from verl.ext import nodes
from verl.ext.nodes import (
    file_problems,
    inspect_node,
    package_problems,
    probe_file,
    shared_memory_problems,
    wait_for_file,
)
from verl.single_controller.actors import ActorLocation
from verl.trainer.cluster import config_for_actors
from verl.training.network import choose_interface


def test_one_folder_for_all_is_no_problem(tmp_path: Path) -> None:
    """The driver's file is seen, another file can be written, and both are removed."""
    with probe_file(tmp_path / "run") as probe:
        assert file_problems(config_with(), probe) == []
    assert list((tmp_path / "run").iterdir()) == []


def test_an_unshared_folder_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that does not see the driver's file has a different folder; the error names it."""
    monkeypatch.setattr(nodes, "FILE_TIMEOUT_S", 0.0)
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
    monkeypatch.setattr(nodes, "FILE_TIMEOUT_S", 0.3)
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
    monkeypatch.setattr(nodes.ray, "get_runtime_context", lambda: context)
    older = {**nodes.installed_versions(), "torch": "1.0"}
    monkeypatch.setattr(nodes, "_start_inspection", lambda *_: nodes.NodeReport((), older))
    monkeypatch.setattr(nodes.ray, "get", lambda report: report)
    nodes.check_nodes(no_tools, config, {"b": "10.0.0.2"})
    message = r"node 10\.0\.0\.2: got torch 1\.0, expected .*node 10\.0\.0\.1"
    with pytest.raises(PreflightError, match=message):
        nodes.check_nodes(no_tools, config, {"own": "10.0.0.1", "b": "10.0.0.2"})


def test_the_problems_of_all_nodes_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All nodes are inspected before any result is awaited; a failed check does not hide others."""
    started: list[str] = []
    monkeypatch.setattr(nodes, "_start_inspection", lambda node, *_: started.append(node) or node)

    def result(node: str) -> nodes.NodeReport:
        assert started == ["a", "b", "c"]
        if node == "c":
            return nodes.NodeReport((ConfigError("no tool"),), {})
        raise RayError(f"Traceback\nno verl on {node}")

    monkeypatch.setattr(nodes.ray, "get", result)
    context = SimpleNamespace(get_node_id=lambda: "own")
    monkeypatch.setattr(nodes.ray, "get_runtime_context", lambda: context)
    config = config_with(f"trainer.default_local_dir={tmp_path}/run")
    with pytest.raises(PreflightError) as caught:
        nodes.check_nodes(no_tools, config, {"a": "1.1", "b": "1.2", "c": "1.3"})
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


def test_a_tool_that_is_missing_on_a_node_is_reported_as_such(tmp_path: Path) -> None:
    """It is not reported as an environment without verl, as an error of the check would be."""

    def missing(config: Config) -> Environment:
        raise ConfigError("agent.tools: got /own.py, expected a Python file that exists")

    with probe_file(tmp_path / "run") as probe:
        report = inspect_node._function(config_with(), missing, probe, {})
    assert "agent.tools: got /own.py" in "".join(map(str, report.problems))
    assert "torch" in report.packages


def test_ranks_on_several_nodes_meet_where_the_first_is() -> None:
    """Ranks of one node need no network."""
    asked: list[tuple[Callable[..., None], str]] = []

    def group(where: str) -> Any:
        locations = [ActorLocation(node, f"10.0.0.{node}", ()) for node in where]
        return SimpleNamespace(locations=lambda: locations, run=lambda *call: asked.append(call))

    nodes.choose_interfaces([group("11"), group("212"), group("3")])
    assert asked == [(choose_interface, "10.0.0.2")]
