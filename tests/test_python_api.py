"""The code of docs/reference/python.md, and a run resumed from Python and from the command line."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from search_r1.retrieval.index_builder import BuildConfig, build_index
from tests.bad_models import whole_model
from tests.test_end_to_end import write_rows
from verl.config import Config
from verl.monitor.tracking import Tracker, Tracking
from verl.trainer import run

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "python.md"


def blocks(language: str) -> list[str]:
    """Return the page's code blocks in that language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def stand_in(config: Config, trackers: Sequence[Tracker]) -> None:
    """Replace a run: log two steps, and write a model and the configuration."""
    out = Path(config.trainer.default_local_dir)
    with Tracking.from_config(config, trackers) as tracking:
        for step in (1, 2):
            tracking.log({"critic/score/mean": 0.5}, step)
    shutil.copytree("model", out / "model", dirs_exist_ok=True)
    run.cli.write_resolved(config, out)


def test_the_page_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All blocks of the page run as one program; only the slow training is replaced."""
    whole_model(tmp_path / "model")
    for name in ("train", "test"):
        write_rows(tmp_path / f"{name}.parquet")
    (tmp_path / "train.jsonl").write_text('{"question": "where is Oslo", "answer": "Norway"}\n')
    passages = '{"id": "0", "contents": "\\"Oslo\\"\\nOslo is the capital of Norway."}\n'
    (tmp_path / "corpus.jsonl").write_text(passages)
    corpus = str(tmp_path / "corpus.jsonl")
    build_index(BuildConfig("wiki", corpus, str(tmp_path / "index"), "hash"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "run", stand_in)
    monkeypatch.setattr("search_r1.retrieval.local_server.LocalServer.start", lambda self: self)
    monkeypatch.setattr("search_r1.retrieval.local_server.LocalServer.stop", lambda self: None)
    exec("".join(blocks("python")), {"__name__": "__main__"})
    output = capsys.readouterr().out
    assert "2 None runs/mine/model" in output and "1 0.5" in output
    assert "'origin': 'policy'" in output
    assert json.loads((tmp_path / "runs/mine/metrics.jsonl").read_text().splitlines()[0])


PROGRAM = '''
"""A program with everything in one file."""

import asyncio
import sys

from search_r1 import Config, Trainer
from verl.agent.interface import Item, Observation, Tool, text_arguments


class Shout(Tool):
    name = "shout"
    parameters = text_arguments(text="what")

    async def call(self, *, text):
        return Observation((Item(text.upper()),))


def reward(dialogue):
    return float(len(dialogue.policy_texts[0]) % 7)


def find(query):
    return [f"About {query}\\nThe answer is a."]


def small():
    config = Config()
    data, policy, trainer = config.data, config.actor_rollout_ref, config.trainer
    data.train_files = data.val_files = "rows.parquet"
    data.train_batch_size, data.val_batch_size = 2, 8
    data.max_start_length, data.max_prompt_length = 128, 256
    data.max_response_length, data.max_obs_length = 12, 64
    policy.model.path, policy.rollout.n_agent, policy.rollout.cpu_kv_cache_gib = "model", 2, 1
    policy.actor.optim.lr, policy.actor.ppo_max_token_len_per_gpu = 1e-3, 512
    config.algorithm.adv_estimator = "grpo"
    trainer.device, trainer.compute_dtype, trainer.n_gpus_per_node = "cpu", "float32", 1
    trainer.total_training_steps, trainer.save_freq, trainer.test_freq = 2, 1, 0
    trainer.default_local_dir, config.template, config.max_turns = "run", "short", 1
    return config


async def notebook(config):
    steps, scores = [], []
    trainer = Trainer(config, tools=["search", Shout], reward=reward, retriever=find,
                      on_step=lambda step, metrics: steps.append(step),
                      on_validation=lambda step, metrics: scores.append(step))
    history = trainer.train()
    print([row["step"] for row in history.steps], steps, scores, history.checkpoint, history.model)


if __name__ == "__main__":
    words = ["--config-dir", "run", "--config-name", "config", "trainer.resume_mode=auto"]
    go_on = [*words, "trainer.total_training_steps=4"]
    asyncio.run(notebook(go_on if "resume" in sys.argv else small()))
'''


@pytest.mark.slow
@pytest.mark.vllm_cpu
def test_python_and_the_command_line_go_on_with_each_others_runs(tmp_path: Path) -> None:
    """Steps 1 and 2 run from Python in an event loop, 3 from the shell, 4 from Python again."""
    whole_model(tmp_path / "model", hidden_size=128)
    write_rows(tmp_path / "rows.parquet")
    (tmp_path / "program.py").write_text(PROGRAM)
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": paths}

    def start(*words: str) -> str:
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True,
                              text=True, timeout=300, env=env)  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
        return done.stdout

    output = start("program.py")
    assert output.endswith("[0, 1, 2] [1, 2] [0] run/global_step_2 run/model\n")
    words = ["-m", "search_r1.cli", "train", "--config-dir", "run", "--config-name", "config"]
    more = ["trainer.total_training_steps=3", "trainer.resume_mode=auto", "retriever.url=empty"]
    start(*words, *more)
    assert start("program.py", "resume").endswith("[4] [4] [] run/global_step_4 run/model\n")
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
