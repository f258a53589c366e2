"""The whole system as jobs of a real Slurm: a tiny policy on the CPU, its retriever, Ray, vLLM."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pandas as pd
import pytest

from example.tiny import tiny_model
from tests.scripts.slurm.cluster import (
    ROOT,
    Cluster,
    wait_until,
)

pytestmark = [pytest.mark.slow, pytest.mark.vllm_cpu, pytest.mark.timeout(1200)]

OPTIONS = (
    "data.max_start_length=128",
    "data.max_prompt_length=256",
    "data.max_response_length=12",
    "data.max_obs_length=64",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=512",
    "actor_rollout_ref.actor.skip_zero_advantages=false",  # a random model earns nothing
    "actor_rollout_ref.actor.use_kl_loss=false",
    "actor_rollout_ref.rollout.cpu_kv_cache_gib=1",
    "trainer.device=cpu",
    "trainer.compute_dtype=float32",
    "trainer.val_before_train=false",
    "template=short",
    "+max_turns=1",
)


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, str]:
    """The variables of a GRPO run of the tiny policy."""
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
    pd.DataFrame(rows).to_parquet(tmp_path / "rows.parquet")
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_bytes((ROOT / "example" / "corpus.jsonl").read_bytes())
    return {
        "PYTHON": sys.executable,
        "BASE_MODEL": str(tiny_model(tmp_path / "model")),
        "TRAIN_FILES": str(tmp_path / "rows.parquet"),
        "VAL_FILES": str(tmp_path / "rows.parquet"),
        "CORPUS_PATH": str(corpus),
        "RETRIEVER_NAME": "bm25",
        "OUTPUT_DIR": str(tmp_path / "run"),
        "LOG_DIR": str(tmp_path / "logs"),
        "N_GPUS": "1",
        "GRADIENT_CHECKPOINTING": "false",
        "TRAIN_BATCH_SIZE": "2",
        "VAL_BATCH_SIZE": "8",
        "MINI_BATCH_SIZE": "2",
        "N_AGENT": "2",
        "ACTOR_LR": "1e-3",
        "TOPK": "1",
        "LOGGER": "[jsonl]",
        "SAVE_FREQ": "-1",
        "TEST_FREQ": "0",
    }


def steps(settings: dict[str, str]) -> list[int]:
    """Return the steps whose metrics the run has logged, in order."""
    path = Path(settings["OUTPUT_DIR"]) / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [row["step"] for row in map(json.loads, lines) if row["step"] > 0]


def test_a_run_out_of_time_is_saved_requeued_resumed_and_finished(
    cluster: Cluster, settings: dict[str, str]
) -> None:
    """Every step is done once, over two starts of one job, and the model is exported."""
    settings["TOTAL_STEPS"] = "8"
    job = cluster.submit("train.sbatch", *OPTIONS, env=settings)
    cluster.wait_log(job, "retriever: http")
    wait_until(lambda: bool(steps(settings)) or "is over" in cluster.log(job), 500, "step 1")
    cluster.command("scancel", "--batch", "--signal=USR1", job)
    cluster.wait_restart(job, 1)
    done = steps(settings)
    assert 1 <= len(done) < 8
    assert f"continues after step {done[-1]}" in cluster.log(job)
    cluster.wait_state(job, "COMPLETED", 500)
    assert steps(settings) == list(range(1, 9))
    assert (Path(settings["OUTPUT_DIR"]) / "model" / "config.json").exists()


def test_two_nodes_train_together(cluster: Cluster, settings: dict[str, str]) -> None:
    """There is one rank on each of two nodes, in one Ray cluster that the job started."""
    settings |= {"TOTAL_STEPS": "2", "RETRIEVER_NODES": "all"}
    job = cluster.submit("train.sbatch", *OPTIONS, options=["--nodes=2"], env=settings)
    cluster.wait_state(job, "COMPLETED", 600)
    assert "Ray: 2 nodes at" in cluster.log(job)
    assert steps(settings) == [1, 2]
