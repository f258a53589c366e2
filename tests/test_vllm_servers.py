"""Training with two vLLM servers that the user started: real servers, ranks, Ray and weights."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from tests.compare import read_rows
from tests.test_end_to_end import ROOT, command_of, train
from tests.verl.rollout.engines import exact_log_probs, model_in
from tests.vllm_servers import Served
from verl.weights.node_folder import PREFIX

pytestmark = [pytest.mark.slow, pytest.mark.vllm_cpu]

LONGEST = 268
PROMPT = list(range(100, 140))


@pytest.fixture(scope="module")
def servers(
    world: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Served]]:
    """Start two servers with the run's initial model."""
    folder = tmp_path_factory.mktemp("servers")
    found = [Served(Path(world["model"]), folder / f"{i}.log", LONGEST).start() for i in (0, 1)]
    try:
        for server in found:
            server.wait()
        yield found
    finally:
        for server in found:
            server.kill()


def of(servers: Sequence[Served], steps: int) -> list[str]:
    """Return the options of a run with these servers."""
    urls = ",".join(server.url for server in servers)
    return [
        f"actor_rollout_ref.rollout.url=[{urls}]", f"trainer.total_training_steps={steps}",
        "trainer.n_gpus_per_node=1", "algorithm.adv_estimator=gae", "trainer.save_freq=0",
        "trainer.test_freq=0", "trainer.val_before_train=false",
    ]  # fmt: skip


def sampled(server: Served) -> tuple[list[int], list[float]]:
    """Return ids and log-probs of a completion."""
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 1.0, "seed": 3, "logprobs": 0,
            "return_token_ids": True, "ignore_eos": True}  # fmt: skip
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120, trust_env=False)
    (choice,) = answer.raise_for_status().json()["choices"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def assert_serves(server: Served, model: Path, is_it: bool = True) -> None:
    """Check that the server's log-probs are those of a model, computed by transformers."""
    ids, log_probs = sampled(server)
    exact = exact_log_probs(model_in(model), [*PROMPT, *ids], len(PROMPT))
    assert (log_probs == pytest.approx(exact, abs=1e-3)) is is_it


def test_servers_take_each_version_and_one_may_die(
    world: dict[str, str], servers: list[Served], tmp_path: Path
) -> None:
    """Servers sample with the ranks' weights at each step, also after one was killed.

    In the end both serve the exported model.
    """
    assert_serves(servers[0], Path(world["model"]))
    out = tmp_path / "run"
    file = out / "metrics.jsonl"
    command = command_of(world, out, *of(servers, 4))
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        end = time.monotonic() + 400
        while not read_rows(file) and run.poll() is None and time.monotonic() < end:
            time.sleep(0.2)
        servers[1].kill()
        servers[1].start()
        said, _ = run.communicate(timeout=500)
    assert run.returncode == 0, said[-6000:]
    steps = read_rows(file)
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert all(0 < row["actor/rollout_mismatch"] < 1e-3 for row in steps)
    assert all(row["fault/trajectories_dropped"] == 0 for row in steps)
    assert steps[-1]["fault/replica_restarts"] >= 1
    for server in servers:
        assert_serves(server, out / "model")
        assert_serves(server, Path(world["model"]), is_it=False)
    assert not list(Path("/dev/shm").glob(f"{PREFIX}*"))


def test_servers_sample_while_the_ranks_train(
    world: dict[str, str], servers: list[Served], tmp_path: Path
) -> None:
    """Servers sample one step ahead, and the user names the folder."""
    weights = tmp_path / "weights"
    rows = train(
        world, tmp_path / "run", *of(servers, 3), "actor_rollout_ref.rollout.max_staleness=1",
        f"actor_rollout_ref.rollout.weights_dir={weights}",
    )  # fmt: skip
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[-1]["rollout/staleness/mean"] > 0
    assert list(weights.iterdir()) == []
    for server in servers:
        assert_serves(server, tmp_path / "run" / "model")
