"""Runs on two machines with a Ray node each; the machines are simulated by namespaces."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from example.tiny import tiny_model
from tests.compare import Row, read_rows
from tests.machines import Machine, are_possible, cut, plug, reconnect, two_machines

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.vllm_cpu,
    pytest.mark.skipif(not are_possible(), reason="needs root and namespaces"),
]

ROOT = Path(__file__).resolve().parent.parent
RETRIEVER = "http://127.0.0.1:8000/retrieve"
RAY_PORT = 6379
LIMIT_S = 900.0
"""Seconds after which a test gives up waiting."""
ENV = {
    "RAY": str(Path(sys.executable).with_name("ray")),
    "RAY_AUTH_MODE": "disabled",
    "PYTHONPATH": str(ROOT),
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "NUM_CPUS": "1",
    "OBJECT_STORE_MEMORY": "100000000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "REJOIN": "2",
    "DASHBOARD": "false",
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that both machines see, with a tiny random model, eight questions and a corpus."""
    folder = tmp_path_factory.mktemp("world")
    tiny_model(folder / "model")
    rows = [
        {
            "data_source": "nq",
            "prompt": [{"role": "user", "content": f"Question {i}?"}],
            "ability": "fact-reasoning",
            "reward_model": {"style": "rule", "ground_truth": {"target": ["a"]}},
            "extra_info": {"split": "train", "index": i},
        }
        for i in range(8)
    ]
    pd.DataFrame(rows).to_parquet(folder / "rows.parquet")
    lines = (ROOT / "example" / "corpus.jsonl").read_text().splitlines(keepends=True)[:50]
    (folder / "corpus.jsonl").write_text("".join(lines))
    return folder


def wait_until(machine: Machine, script: str, name: str, seconds: float = LIMIT_S) -> None:
    """Run a shell command on the machine until it succeeds; `name` describes the condition."""
    end = time.monotonic() + seconds
    while subprocess.run(machine.command("sh", "-c", script), capture_output=True).returncode:
        assert time.monotonic() < end, f"no {name}: {machine.log.read_text()[-3000:]}"
        time.sleep(0.5)


def start_retriever(machine: Machine, world: Path) -> None:
    """Start the machine's own retriever, at a local address that is the same on all machines."""
    machine.start(
        sys.executable, "-m", "search_r1.retrieval.command", "--retriever_name", "bm25",
        "--corpus_path", str(world / "corpus.jsonl"), "--port", "8000", env=ENV,
    )  # fmt: skip
    wait_until(machine, "ss -ltn | grep -q :8000", "retriever")


def start_worker(first: Machine, second: Machine) -> None:
    """Let the second machine join the first's cluster, and rejoin it after each disconnection."""
    script = str(ROOT / "example/multinode/worker.sh")
    second.start("bash", script, env={**ENV, "HEAD_ADDRESS": first.address})


def wait_for_log(machine: Machine, text: str, seconds: float = LIMIT_S) -> None:
    """Wait until the machine's log has a line with `text`."""
    end = time.monotonic() + seconds
    while text not in machine.log.read_text():
        assert time.monotonic() < end, f"no {text!r} in:\n{machine.log.read_text()[-6000:]}"
        time.sleep(0.2)


def start_cluster(first: Machine, second: Machine) -> None:
    """Start Ray on both machines as docs/guides/clusters.md describes."""
    script = str(ROOT / "example/multinode/head.sh")
    first.start("bash", script, env={**ENV, "NODE_ADDRESS": first.address})
    wait_until(first, f"ss -ltn | grep -q :{RAY_PORT}", "Ray head")
    start_worker(first, second)


def options(world: Path, out: Path, *more: str) -> list[str]:
    """Return the command of a run with two ranks and two engines."""
    return [
        sys.executable, "-m", "verl.trainer.main_ppo",
        f"data.train_files={world}/rows.parquet", f"data.val_files={world}/rows.parquet",
        "data.train_batch_size=2", "data.val_batch_size=8", "data.max_start_length=128",
        "data.max_prompt_length=256", "data.max_response_length=12", "data.max_obs_length=64",
        f"actor_rollout_ref.model.path={world}/model", "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n_agent=2", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.optim.lr=1e-3", "actor_rollout_ref.rollout.cpu_kv_cache_gib=1",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=512",
        "actor_rollout_ref.rollout.num_replicas=2", "actor_rollout_ref.actor.use_kl_loss=true",
        "trainer.device=cpu", "trainer.compute_dtype=float32", "trainer.logger=[jsonl]",
        f"trainer.default_local_dir={out}", f"retriever.url={RETRIEVER}", "retriever.topk=1",
        "template=short", "+max_turns=1", "trainer.test_freq=0", "trainer.save_freq=1",
        "trainer.val_before_train=false",
        "trainer.memory_preflight=warn", *more,
    ]  # fmt: skip


TWO_NODES = ("trainer.nnodes=2", "trainer.n_gpus_per_node=1", "trainer.resume_mode=auto")
ONE_NODE = ("trainer.nnodes=1", "trainer.n_gpus_per_node=2")


def finish(run: subprocess.Popen[bytes], machine: Machine) -> None:
    """Wait for a run to end successfully."""
    status = run.wait(LIMIT_S)
    assert status == 0, machine.log.read_text()[-8000:]


@pytest.fixture(scope="module")
def machines(
    world: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Machine, Machine]]:
    """Start two machines with a retriever each, in one Ray cluster."""
    with two_machines(tmp_path_factory.mktemp("machines")) as (first, second):
        start_retriever(first, world)
        start_retriever(second, world)
        start_cluster(first, second)
        yield first, second


def start_run(machine: Machine, world: Path, out: Path, *more: str) -> subprocess.Popen[bytes]:
    """Start a run's driver on `machine`."""
    env = {**ENV, "RAY_ADDRESS": f"{machine.address}:{RAY_PORT}"}
    return machine.start(*options(world, out, *TWO_NODES, *more), env=env)


@pytest.fixture(scope="module")
def undisturbed(world: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """Metrics of three steps on a single machine."""
    out = tmp_path_factory.mktemp("one")
    with two_machines(tmp_path_factory.mktemp("alone")) as (first, _):
        start_retriever(first, world)
        run = first.start(
            *options(world, out, *ONE_NODE, "trainer.total_training_steps=3"), env=ENV
        )
        finish(run, first)
    return read_rows(out / "metrics.jsonl")


SAME = (
    "actor/pg_loss", "actor/grad_norm", "actor/kl_loss", "actor/entropy", "actor/rollout_mismatch",
    "response_length/mean", "env/turns", "env/observation_tokens",
)  # fmt: skip


def assert_same(found: list[Row], expected: list[Row]) -> None:
    """Assert equal steps and metrics, up to rounding by the order of additions."""
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    for ours, theirs in zip(found, expected, strict=True):
        for name in SAME:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name


def test_a_node_that_lacks_something_is_named_before_any_work(
    world: Path, machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    """Model and results that only one machine sees are reported at once, with node and path."""
    first, second = machines
    folders = (world / "model", tmp_path)
    for folder in folders:
        second.hide(folder)
    log_start = first.log.stat().st_size
    try:
        run = start_run(first, world, tmp_path, "trainer.total_training_steps=1")
        assert run.wait(LIMIT_S) == 2
    finally:
        for folder in folders:
            second.run("umount", str(folder))
    log = first.log.read_text()[log_start:]
    assert "the run cannot start, 2 problem(s):" in log
    for folder in folders:
        assert re.search(rf"node {second.address}: .*{re.escape(str(folder))}", log), log
    assert read_rows(tmp_path / "metrics.jsonl") == []


def test_two_nodes_compute_what_one_does(
    world: Path,
    machines: tuple[Machine, Machine],
    undisturbed: list[Row],
    tmp_path: Path,
) -> None:
    """Two ranks and engines on two machines have the same metrics as on one, step by step."""
    first, _ = machines
    finish(start_run(first, world, tmp_path, "trainer.total_training_steps=3"), first)
    assert_same(read_rows(tmp_path / "metrics.jsonl"), undisturbed)
    for machine in machines:
        wait_until(machine, "! ls -a /dev/shm | grep -q verl-weights", "free memory")


def disturb_after_step_one(first: Machine, world: Path, out: Path) -> subprocess.Popen[bytes]:
    """Start a run of three steps and wait until the first is saved and the second has started."""
    run = start_run(first, world, out, "trainer.total_training_steps=3")
    end = time.monotonic() + LIMIT_S
    while not (out / "global_step_1" / "COMPLETE").exists():
        assert run.poll() is None, first.log.read_text()[-6000:]
        assert time.monotonic() < end, first.log.read_text()[-6000:]
        time.sleep(0.1)
    return run


def test_a_node_that_is_cut_off_and_comes_back(
    world: Path,
    machines: tuple[Machine, Machine],
    undisturbed: list[Row],
    tmp_path: Path,
) -> None:
    """Without the network the run stops; with it, node and run continue to the same result."""
    first, second = machines
    run = disturb_after_step_one(first, world, tmp_path)
    cut(second)
    wait_for_log(first, "waiting for 2 x")
    reconnect(second)
    finish(run, first)
    assert_same(read_rows(tmp_path / "metrics.jsonl"), undisturbed)


def test_a_node_that_loses_power_is_replaced(
    world: Path,
    machines: tuple[Machine, Machine],
    undisturbed: list[Row],
    tmp_path: Path,
) -> None:
    """A machine that is switched off and on, with Ray restarted, rejoins the run."""
    first, second = machines
    run = disturb_after_step_one(first, world, tmp_path)
    second.switch_off()
    second.switch_on()
    plug(first, second)
    start_retriever(second, world)
    start_worker(first, second)
    finish(run, first)
    assert_same(read_rows(tmp_path / "metrics.jsonl"), undisturbed)
