"""The complete system: Ray, FSDP ranks, vLLM and the HTTP retriever, from rows to a model."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from search_r1.retrieval.local_server import LocalServer
from tests.bad_models import whole_model
from tests.planted import PLANTED, SECRETS, URL, leaks, shown
from tests.verl.trainer.documented import undocumented

pytestmark = pytest.mark.vllm_cpu

ROOT = Path(__file__).resolve().parent.parent


@contextlib.contextmanager
def start_world(folder: Path) -> Iterator[dict[str, str]]:
    """Yield a tiny random model, a few rows, and a running retriever over the example corpus."""
    model = whole_model(folder / "model", hidden_size=128)  # heads of 32, the smallest of vLLM
    write_rows(folder / "rows.parquet")
    corpus = folder / "corpus.jsonl"
    corpus.write_bytes((ROOT / "example" / "corpus.jsonl").read_bytes())
    arguments = ["--corpus_path", str(corpus), "--retriever_name", "bm25"]
    with LocalServer(arguments) as server:
        yield {"model": str(model), "rows": str(folder / "rows.parquet"), "url": server.url}


def write_rows(path: Path, answer: str = "a") -> None:
    """Write four questions of each of two data sets, with one answer."""
    rows = [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": f"Question {i}?"}],
            "ability": "fact-reasoning",
            "reward_model": {"style": "rule", "ground_truth": {"target": [answer]}},
            "extra_info": {"split": "train", "index": i},
        }
        for i in range(4)
        for source in ("nq", "hotpotqa")
    ]
    pd.DataFrame(rows).to_parquet(path)


def command_of(world: dict[str, str], out: Path, *options: str) -> list[str]:
    """Return the command line of a small run."""
    return [
        sys.executable, "-m", "verl.trainer.main_ppo",
        f"data.train_files={world['rows']}", f"data.val_files={world['rows']}",
        "data.train_batch_size=2", "data.val_batch_size=5", "data.max_start_length=256",
        "data.max_prompt_length=512", "data.max_response_length=12", "data.max_obs_length=192",
        f"actor_rollout_ref.model.path={world['model']}",
        "actor_rollout_ref.rollout.n_agent=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.optim.lr=1e-3", "actor_rollout_ref.rollout.cpu_kv_cache_gib=1",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1024",
        "trainer.device=cpu", "trainer.compute_dtype=float32", "trainer.logger=[jsonl]",
        f"trainer.default_local_dir={out}", f"retriever.url={world['url']}/retrieve",
        "actor_rollout_ref.actor.entropy_coeff=1e-6",  # a random model gets no reward
        "retriever.topk=1", "template=short", "+max_turns=1", *options,
    ]  # fmt: skip


def train(
    world: dict[str, str], out: Path, *options: str, **variables: str
) -> list[dict[str, Any]]:
    """Run main_ppo as a user does, with `variables` of the environment; returns the metrics."""
    command, env = command_of(world, out, *options), os.environ | variables
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=590, env=env)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


PRESET = {
    "defaults": ["ppo_trainer", "_self_"],
    "algorithm": {"adv_estimator": "gae"},
    "reward_model": {"judge": {"url": URL}},
    "trainer": {"n_gpus_per_node": 2, "total_training_steps": 2},
}


@pytest.fixture(scope="module")
def ppo_run(
    world: dict[str, str], ray_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Run PPO on two ranks: critic, KL in the reward, two steps with a checkpoint each.

    Next to its folder are its preset, its `log`, and `showed`, the secrets seen in command lines.
    """
    folder = tmp_path_factory.mktemp("ppo")
    out, log, showed = folder / "out", folder / "log", set()
    (folder / "own.yaml").write_text(yaml.safe_dump(PRESET))
    command = command_of(world, out, "-cd", str(folder), "-cn", "own",
                         "trainer.save_freq=1", "trainer.test_freq=1")  # fmt: skip
    env = {**os.environ, **PLANTED, "RAY_TMPDIR": str(ray_folder)}
    with log.open("w") as file:
        run = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, env=env)
        while run.poll() is None:
            showed.update(shown())
            time.sleep(0.3)
    assert run.returncode == 0, log.read_text()[-6000:]
    (folder / "showed").write_text("\n".join(showed))
    return out


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_engine_and_trainer_agree_after_every_update(ppo_run: Path) -> None:
    """Log-probs of new samples from the engine and from two FSDP ranks differ by less than 1e-3."""
    steps = [row for row in metrics(ppo_run) if row["step"] > 0]
    assert [row["step"] for row in steps] == [1, 2]
    assert all(0 < row["actor/rollout_mismatch"] < 1e-3 for row in steps)
    assert all(row["actor/lr"] == 1e-3 and row["actor/skipped_updates"] == 0 for row in steps)


def test_every_row_is_validated_each_time(ppo_run: Path) -> None:
    """All eight rows in requests of five, before training and after each step."""
    assert [row["val/num_rows"] for row in metrics(ppo_run)] == [8, 8, 8]


def test_every_metric_is_documented(ppo_run: Path) -> None:
    """docs/reference/metrics.md lists all metrics of a run, also parts of the weight transfer."""
    first, *steps = metrics(ppo_run)
    assert undocumented({name for row in (first, *steps) for name in row} - {"step"}) == []
    for row in steps:
        parts = [
            row[f"timing_s/update_weights/{x}"] for x in ("wake_up", "gather", "write", "load")
        ]
        assert min(parts) >= 0 and sum(parts) <= row["timing_s/update_weights"]
        assert row["perf/tflops/actor"] > 0 and row["perf/tflops/critic"] > 0


def test_the_export_is_the_trained_model(world: dict[str, str], ppo_run: Path) -> None:
    """transformers loads `model/`, whose weights differ from the initial ones."""
    trained = AutoModelForCausalLM.from_pretrained(ppo_run / "model", dtype=torch.float32)
    start = AutoModelForCausalLM.from_pretrained(world["model"], dtype=torch.float32)
    pairs = zip(trained.parameters(), start.parameters(), strict=True)
    assert max(float((a - b).abs().max()) for a, b in pairs) > 1e-4


def test_a_run_leaves_no_secret(ppo_run: Path, ray_folder: Path) -> None:
    """No secret is in the run's folder, in Ray's folder, in the log, or on command lines."""
    log, showed = ((ppo_run.parent / name).read_text() for name in ("log", "showed"))
    assert showed == "" and not any(secret in log for secret in SECRETS)
    assert any(ray_folder.rglob("*.log"))
    assert leaks(ray_folder, ppo_run) == []
    for saved in ("config.yaml", "global_step_1/trainer_state.json"):
        assert "***@127.0.0.1" in (ppo_run / saved).read_text()


def test_nothing_is_left_running(ppo_run: Path) -> None:
    """No engine, rank or Ray process of a finished run survives it."""
    out = str(ppo_run)
    left = [p.info["cmdline"] for p in psutil.process_iter(["cmdline"])
            if p.info["cmdline"] and out in " ".join(p.info["cmdline"])]  # fmt: skip
    assert left == []
