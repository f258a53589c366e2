"""Runs and resumes the recipes' scripts on a tiny policy that searches a real retriever."""

import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from scripts.gpu_checks.report import NOTE, Report, Skipped, has_vllm
from scripts.gpu_checks.runner import ROOT, stop_tree
from scripts.gpu_checks.world import write_demonstrations, write_model, write_questions
from scripts.processes import run
from search_r1.retrieval.local_server import LocalServer

TRANSFER = "timing_s/update_weights"
MAX_MISMATCH = 0.02
"""Bound on the mean difference between the engine's and the trainer's log-probs in each step."""
SMALL = {
    "TRAIN_BATCH_SIZE": "4", "VAL_BATCH_SIZE": "8", "N_AGENT": "2", "MINI_BATCH_SIZE": "4",
    "MAX_PROMPT_LENGTH": "512", "MAX_START_LENGTH": "128", "MAX_RESPONSE_LENGTH": "48",
    "MAX_OBS_LENGTH": "256", "MAX_TURNS": "1", "TOPK": "1", "ACTOR_LR": "1e-4",
    "ACTOR_WARMUP": "0", "CRITIC_WARMUP": "0", "GPU_MEMORY_UTILIZATION": "0.3",
    "LOGGER": "[console,jsonl]", "SAVE_FREQ": "1", "TEST_FREQ": "0",
}  # fmt: skip
"""The recipe's variables, for dialogues of a few hundred tokens."""


@dataclass(frozen=True)
class World:
    """The inputs of a run: a policy that searches, questions, and a running retriever."""

    model: Path
    questions: Path
    url: str


@contextlib.contextmanager
def world(report: Report) -> Iterator[World]:
    """Create the inputs of a run; the retriever is stopped afterwards."""
    folder = report.folder
    model, questions = folder / "policy", folder / "questions.parquet"
    write_questions(questions)
    write_demonstrations(folder / "dialogues.jsonl")
    start = write_model(folder / "random", "tiny")
    run(
        [sys.executable, "-m", "verl.trainer.sft", f"model_path={start}", f"output_dir={model}",
         f"train_file={folder / 'dialogues.jsonl'}", "steps=80", "lr=3e-3",
         f"device={report.device}"],
        ROOT,
    )  # fmt: skip
    corpus = folder / "corpus.jsonl"
    shutil.copy(ROOT / "example" / "corpus.jsonl", corpus)
    flags = ["--retriever_name", "bm25", "--corpus_path", str(corpus)]
    with LocalServer(flags, log_path=folder / "retriever.log") as server:
        yield World(model, questions, server.url)


@dataclass(frozen=True)
class Recipe:
    """One way to call `train_grpo.sh` or `train_ppo.sh`."""

    world: World
    device: str
    out: Path
    script: str
    num_gpus: int = 1
    options: Sequence[str] = ()
    offload: str = "null"
    """Value of OFFLOAD: true, false, or null for an automatic choice."""

    def start(self, steps: int, *options: str) -> subprocess.Popen[bytes]:
        """Start the script as a user does; its output goes to the check's log."""
        environment = SMALL | {
            "PYTHON": sys.executable, "BASE_MODEL": str(self.world.model),
            "TRAIN_FILES": str(self.world.questions), "VAL_FILES": str(self.world.questions),
            "RETRIEVER_URL": f"{self.world.url}/retrieve", "OUTPUT_DIR": str(self.out),
            "N_GPUS": str(self.num_gpus), "TOTAL_STEPS": str(steps), "OFFLOAD": self.offload,
        }  # fmt: skip
        return subprocess.Popen(
            ["bash", self.script, f"trainer.device={self.device}", "template=short",
             "trainer.val_before_train=false", "actor_rollout_ref.rollout.cpu_kv_cache_gib=1",
             *self.options, *options],
            cwd=ROOT, env={**os.environ, **environment},
        )  # fmt: skip

    def finish(self, steps: int, *options: str) -> list[dict[str, Any]]:
        """Run to the end; returns the metrics of all steps so far. Raises CalledProcessError."""
        process = self.start(steps, *options)
        try:
            code = process.wait()
        finally:
            if process.poll() is None:
                stop_tree(process.pid)
        if code:
            raise subprocess.CalledProcessError(code, self.script)
        return self.rows()

    def rows(self) -> list[dict[str, Any]]:
        """Return the metrics of each step logged so far."""
        path = self.out / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def grpo(report: Report) -> None:
    """Check three steps with the recipe's settings (CUDA graphs), and a fourth after a resume."""
    with world(report) as inputs:
        steps_and_resume(report, Recipe(inputs, report.device, report.folder / "run", GRPO), 3)


def ipc(report: Report) -> None:
    """Check three steps whose weights pass from rank to engine within the card's memory."""
    report.need_vllm()
    if not report.on_card:
        report.record(NOTE, "the same code through host memory: CUDA IPC was not run")
    with world(report) as inputs:
        options = ["actor_rollout_ref.rollout.weight_sync=ipc"]
        recipe = Recipe(inputs, report.device, report.folder / "run", GRPO, options=options)
        rows = recipe.finish(3)
        check_metrics(report, "run", rows, [1, 2, 3])
        check_transfers(report, inputs.model, [row for row in rows if row["step"] > 0])


def check_transfers(report: Report, model: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Check that ranks sent every weight after each step; none is sent if files are written."""
    sent = [row.get("perf/weights_sent_bytes", 0.0) for row in rows]
    smallest = num_weights(model) * torch.bfloat16.itemsize
    report.expect("sent_bytes_least", min(sent, default=0.0), above=smallest - 1)
    for name in sorted({key for row in rows for key in row if key.startswith(TRANSFER)}):
        report.record(f"{name}_each", [float(f"{row[name]:.4g}") for row in rows if name in row])


def num_weights(model: Path) -> int:
    """Count the weights in a model's file; a head that is the embedding is not in it twice."""
    with safe_open(model / "model.safetensors", "pt") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.offset_keys()]
    return sum(map(math.prod, shapes))


def ppo(report: Report) -> None:
    """Check two steps with a critic, offloaded, without graphs, and a third after a resume."""
    with world(report) as inputs:
        options = ["actor_rollout_ref.rollout.engine_kwargs.enforce_eager=true"]
        folder = report.folder / "run"
        recipe = Recipe(inputs, report.device, folder, PPO, options=options, offload="true")
        steps_and_resume(report, recipe, 2)


def two_cards(report: Report) -> None:
    """Check GRPO on two ranks and two engines, offloaded."""
    on_two(report, num_gpus=2, offload="true")


def split_cards(report: Report) -> None:
    """Check GRPO with the rank and the engine, which never sleeps, on separate cards."""
    on_two(report, options=["trainer.rollout_gpus=1"])


def on_two(report: Report, **recipe: Any) -> None:
    """Check three steps with the options in `recipe`, and a fourth after a resume, on two cards."""
    if report.on_card and torch.cuda.device_count() < 2:
        raise Skipped(f"{torch.cuda.device_count()} card here, two are needed")
    with world(report) as inputs:
        folder = report.folder / "run"
        steps_and_resume(report, Recipe(inputs, report.device, folder, GRPO, **recipe), 3)


GRPO, PPO = "train_grpo.sh", "train_ppo.sh"


def steps_and_resume(report: Report, recipe: Recipe, steps: int) -> None:
    """Run `steps` steps, resume from the last checkpoint for one more step, and check both."""
    if not has_vllm():
        report.record(NOTE, "with the transformers engine, as vLLM is not installed")
    check_metrics(report, "run", recipe.finish(steps), list(range(1, steps + 1)))
    rows = recipe.finish(steps + 1, "trainer.resume_mode=auto")
    check_metrics(report, "resumed", rows, list(range(1, steps + 2)))


def check_metrics(report: Report, name: str, rows: list[dict[str, Any]], steps: list[int]) -> None:
    """Check that each step is logged once, log-probs agree, gradients are finite and tools ran."""
    rows = [row for row in rows if row["step"] > 0]
    if [row["step"] for row in rows] != steps:
        report.fail(f"{name}: got steps {[row['step'] for row in rows]}, expected {steps}")
    for key in ("actor/rollout_mismatch", "actor/grad_norm", "actor/skipped_updates"):
        report.record(f"{name}_{key}", [float(f"{row[key]:.4g}") for row in rows if key in row])
    report.expect(
        f"{name}_mismatch", max(row["actor/rollout_mismatch"] for row in rows), below=MAX_MISMATCH
    )
    report.expect(f"{name}_skipped", max(row["actor/skipped_updates"] for row in rows), equal=0)
    if not all(0 < row["actor/grad_norm"] < math.inf for row in rows):
        report.fail(f"{name}: a gradient that is zero or not finite")
    report.expect(f"{name}_searches", rows[-1]["env/valid_searches"], above=0)
    for key, value in rows[-1].items():
        if key.startswith(("timing", "perf/")):
            report.record(f"{name}_{key}", value)
