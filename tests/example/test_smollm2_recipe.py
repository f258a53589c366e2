"""The stages and settings of the recipe, with a fake python that only records its arguments.

One slow test runs the whole recipe with a tiny model.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from example.smollm2.ship import ship
from example.tiny import tiny_model
from search_r1.datasets.command import DemonstrationOptions, DifficultyOptions
from search_r1.evaluation.options import EvaluationOptions
from search_r1.options import parse
from tests.example.smollm2_world import QUESTIONS, write_data
from verl.config import cli
from verl.ext.sft.options import parse as parse_sft

ROOT = Path(__file__).resolve().parents[2]
STAGES = ("data", "dialogues", "audit", "sft", "rl", "adapters", "evaluate")
PYTHON = """#!/bin/bash
[[ $1 != -c ]] || exit 0
(IFS=$'\\t'; printf '%s\\n' "$*") >>"$CALLS"
if [[ $* == *retrieval_server* ]]; then
  while (($#)); do [[ $1 != --port_file ]] || echo 9 >"$2"; shift; done
  exec sleep 60
fi
if [[ $* == *own_questions.py* ]]; then mkdir -p "$OUT/data"; fi
if [[ -n ${COLLAPSES:-} && $* == *main_ppo* ]]; then exit 3; fi
if [[ $* == "${BROKEN:-none}"* ]]; then exit 1; fi
"""
Calls = list[list[str]]


class Recipe:
    """run.sh with a small data folder and a fake python that records its arguments."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "out"
        self.calls = folder / "calls"
        self.python = folder / "python"
        self.python.write_text(PYTHON)
        self.python.chmod(0o755)
        self.data = write_data(folder / "source")

    def run(self, *arguments: str, status: int = 0, **variables: str) -> tuple[Calls, str]:
        """Run the recipe and return its calls of python and its output."""
        self.calls.write_text("")
        default = {"PATH": os.environ["PATH"], "PYTHON": str(self.python), "OUT": str(self.out),
                 "DEVICE": "cpu", "DATA_DIR": str(self.data), "CALLS": str(self.calls)}  # fmt: skip
        command = ["bash", str(ROOT / "example" / "smollm2" / "run.sh"), *arguments]
        done = subprocess.run(command, env={**default, **variables}, capture_output=True, text=True,
                              timeout=60, check=False)  # fmt: skip
        assert done.returncode == status, done.stdout + done.stderr
        calls = [line.split("\t") for line in self.calls.read_text().splitlines()]
        return calls, done.stdout + done.stderr


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return Recipe(tmp_path)


def arguments_of(calls: Calls, module: str) -> list[list[str]]:
    """Return the arguments of each call of a module."""
    return [call[2:] for call in calls if call[1] == module]


def test_finished_stages_are_skipped(recipe: Recipe) -> None:
    """A stage that ran separately is not repeated; a second run of all stages does nothing."""
    calls, _ = recipe.run("--stage", "sft")
    assert [call[1] for call in calls] == ["verl.trainer.sft"]
    calls, output = recipe.run()
    assert not arguments_of(calls, "verl.trainer.sft") and "sft: finished before" in output
    assert recipe.run()[0] == []
    assert sorted(path.name for path in (recipe.out / "done").iterdir()) == sorted(STAGES)


def test_a_failed_stage_runs_again_and_those_before_do_not(recipe: Recipe) -> None:
    """The second run starts with the stage that failed."""
    recipe.run(BROKEN="-m verl.trainer.sft", status=1)
    calls, _ = recipe.run()
    assert calls[0][1] == "verl.trainer.sft"


def test_only_settings_of_later_stages_may_change(recipe: Recipe) -> None:
    """The settings of GRPO may change until it has written files."""
    recipe.run("--stage", "data")
    calls, _ = recipe.run("--stage", "rl", "--set", "rl_steps=3")
    assert "trainer.total_training_steps=3" in arguments_of(calls, "verl.trainer.main_ppo")[0]
    (recipe.out / "rl").mkdir()
    _, output = recipe.run("--set", "rl_steps=4", status=2)
    assert "got rl_steps=4, expected rl_steps=3, as it began" in output


def test_the_arms_of_the_comparison(recipe: Recipe) -> None:
    """The cold start continued begins from its adapter; options of the user's reach GRPO."""
    calls, _ = recipe.run("--stage", "continued", "--set", "continued_steps=7", "sft_rank=18")
    more = parse_sft(arguments_of(calls, "verl.trainer.sft")[0])
    assert (more.steps, more.seed, more.lora_rank, more.lora_alpha) == (7, 1, 18, 36)
    assert Path(str(more.adapter_path)) == recipe.out / "sft" / "adapter"
    recipe.run("--stage", "data")
    calls, _ = recipe.run("--stage", "sampled", "--set", "sampled_steps=5", "sampled_n=3")
    (asked,) = arguments_of(calls, "search_r1.evaluate")
    sampled = parse(EvaluationOptions, asked[1:], prog="evaluate", description=None)
    assert (sampled.n, sampled.temperature, sampled.max_turns) == (3, 1.0, 0)
    assert sampled.data == (str(recipe.out / "data" / "readable.parquet"),)
    (made,) = arguments_of(calls, "search_r1.cli")
    kept = parse(DemonstrationOptions, made[2:], prog="data", description=None)
    imitated = parse_sft(arguments_of(calls, "verl.trainer.sft")[0])
    assert kept.evaluations == (Path(sampled.out),)
    assert (imitated.train_file, imitated.steps) == (str(kept.out), 5)
    for name in ("continued", "sampled"):
        (recipe.out / "adapters" / name).mkdir(parents=True)
    calls, _ = recipe.run("--stage", "evaluate", "--set", "sampled_steps=5", "sampled_n=3")
    runs = [call for call in arguments_of(calls, "search_r1.evaluate") if call[0] == "run"]
    folders = [call[call.index("--out") + 1] for call in runs]
    assert {str(recipe.out / "evaluation" / name) for name in ("continued", "sampled")} < {*folders}
    assert len({*folders, sampled.out}) == len(folders) + 1, "an evaluation in another's folder"
    options = "agent.name=dialogue;max_turns=2;data.filter={evidence: [topk, unknown]}"
    calls, _ = recipe.run("--stage", "rl", "--set", f"rl_options={options}")
    config = cli.compose(arguments_of(calls, "verl.trainer.main_ppo")[0])
    assert (config.agent.name, config.max_turns) == ("dialogue", 2)
    assert config.data.filter == {"evidence": ["topk", "unknown"]}


def test_after_the_pass_rates_grpo_has_the_live_questions(recipe: Recipe) -> None:
    """The rates are of the questions of GRPO; it then trains on those between 0 and 1."""
    recipe.run("--stage", "data")
    calls, _ = recipe.run("--stage", "rates", "--set", "sampled_n=3")
    (asked,) = arguments_of(calls, "search_r1.evaluate")
    sampled = parse(EvaluationOptions, asked[1:], prog="evaluate", description=None)
    (made,) = arguments_of(calls, "search_r1.cli")
    rated = parse(DifficultyOptions, made[2:], prog="data", description=None)
    assert rated.evaluations == (Path(sampled.out),) and sampled.n == 3
    assert tuple(map(str, rated.files)) == sampled.data
    (recipe.out / "sampling").mkdir()
    calls, _ = recipe.run("--stage", "rl", "--set", "sampled_n=3", "sampled_steps=9")
    config = cli.compose(arguments_of(calls, "verl.trainer.main_ppo")[0])
    assert config.data.train_files == str(rated.local_dir / "readable.parquet")
    assert config.data.filter == {"pass_rate": {"gt": 0, "lt": 1}}
    _, output = recipe.run("--stage", "sampled", status=2)
    assert "got sampled_n=4, expected sampled_n=3, as it began" in output


def test_mistakes_are_errors_before_anything_runs(recipe: Recipe) -> None:
    """An unknown setting, stage or budget, and missing data, are errors at the start."""
    for arguments, expected in (
        (("--set", "sft_rate=1"), "got sft_rate=1"),
        (("--stage", "sftt"), "got sftt"),
        (("--sed", "1"), "got --sed"),
    ):
        calls, output = recipe.run(*arguments, status=2)
        assert expected in output and calls == []
    assert "BUDGET=long" in recipe.run(BUDGET="long", status=2)[1]
    (recipe.data / "dev.jsonl").unlink()
    assert "no dev.jsonl; fix: python scripts/data_process" in recipe.run(status=2)[1]
    assert not recipe.out.exists()


@pytest.mark.parametrize("budget", ["short", "full"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_all_options_are_valid(budget: str, device: str, recipe: Recipe) -> None:
    """Cold start, GRPO and all evaluations accept their options, for each budget and device."""
    calls, _ = recipe.run(BUDGET=budget, DEVICE=device)
    cold = parse_sft(arguments_of(calls, "verl.trainer.sft")[0])
    config = cli.compose(arguments_of(calls, "verl.trainer.main_ppo")[0])
    group, updates = config.actor_rollout_ref.rollout.n_agent, config.actor_rollout_ref.actor
    assert updates.ppo_mini_batch_size == config.data.train_batch_size // 2 * group
    assert config.agent.name.endswith("reading.py:reading") and config.max_turns == 0
    (audit,) = arguments_of(calls, "search_r1.cli")
    assert Path(str(config.data.train_files)).parent == Path(audit[audit.index("--local-dir") + 1])
    assert config.data.max_prompt_length == 192 + 2 * (112 + 560)
    assert cold.max_length == config.data.max_prompt_length + config.data.max_response_length
    assert (config.trainer.guard.action, config.trainer.device) == ("stop", device)
    evaluations = {}
    for arguments in arguments_of(calls, "search_r1.evaluate"):
        if arguments[0] == "run":
            options = parse(EvaluationOptions, arguments[1:], prog="evaluate", description=None)
            evaluations[Path(options.out).name] = options
    assert list(evaluations)[:2] == ["select-sft", "select-rl"]
    assert list(evaluations)[2:] == [
        "before",
        "sft",
        "rl",
        "rl-empty",
        "rl-random",
        "direct",
        "rag",
    ]
    methods = [options.method for options in evaluations.values()]
    assert methods == ["agent"] * 7 + ["direct", "rag"]


@pytest.mark.parametrize(("start", "alpha"), [("none", 24), ("some/adapter", 12)])
def test_the_cold_start_may_train_on_an_adapter(start: str, alpha: int, recipe: Recipe) -> None:
    """A new adapter has twice the scale of one that `adapters.write` wrote."""
    calls, _ = recipe.run("--stage", "sft", "--set", f"sft_start={start}")
    cold = parse_sft(arguments_of(calls, "verl.trainer.sft")[0])
    expected = "" if start == "none" else start
    assert (cold.adapter_path, cold.lora_alpha) == (expected, alpha)


def test_the_cold_start_alone_is_evaluated_until_there_is_a_second_adapter(recipe: Recipe) -> None:
    """Without GRPO there is one adapter to evaluate and compare; after it, both are made again."""
    alone = ("--stage", "data", "sft", "adapters", "evaluate", "--set", "sft_save_freq=7")

    def evaluated(calls: Calls) -> list[str]:
        found = [call for call in arguments_of(calls, "search_r1.evaluate") if call[0] == "run"]
        return [Path(call[call.index("--out") + 1]).name for call in found]

    calls, _ = recipe.run(*alone)
    assert parse_sft(arguments_of(calls, "verl.trainer.sft")[0]).save_freq == 7
    assert evaluated(calls) == [
        "select-sft", "before", "sft", "sft-empty", "sft-random", "direct", "rag",
    ]  # fmt: skip
    assert "/rl" not in " ".join(
        word for call in arguments_of(calls, "search_r1.evaluate") for word in call
    )
    calls, _ = recipe.run("--stage", "rl", "adapters", "evaluate", "--set", "sft_save_freq=7")
    assert {"select-sft", "select-rl", "rl-empty"} < set(evaluated(calls))
    assert arguments_of(calls, "example.smollm2.adapters")


def test_after_a_collapse_the_newest_healthy_checkpoint_is_used(recipe: Recipe) -> None:
    """Steps are compared as numbers, and a checkpoint without the mark HEALTHY is not used."""
    recipe.run("--stage", "data")
    for step, is_healthy in ((9, True), (10, True), (20, False)):
        folder = recipe.out / "rl" / f"global_step_{step}"
        folder.mkdir(parents=True)
        if is_healthy:
            (folder / "HEALTHY").touch()
    calls, _ = recipe.run("--stage", "rl", COLLAPSES="1")
    (arguments,) = arguments_of(calls, "verl.checkpoint")
    assert Path(arguments[1]).name == "global_step_10" and arguments[-1] == "--adapter"


@pytest.mark.parametrize("stages", [("sft", "rl"), ("sft",)])
def test_the_better_adapter_is_shipped_with_its_command(
    stages: tuple[str, ...], tmp_path: Path
) -> None:
    """The choice is by EM, then F1, on `select` alone; `made.json` has the run's command.

    A cold start alone is shipped as well; one that was trained on the shipped adapter keeps how
    that one was made.
    """
    scores = {
        "select-sft": (0.1, 0.3),
        "select-rl": (0.1, 0.4),
        "sft": (0.9, 0.9),
        "rl": (0.1, 0.1),
    }
    for name in (*stages, *(f"select-{stage}" for stage in stages)):
        em, f1 = scores[name]
        estimates = {"all rows": {"em": {"value": em}, "f1": {"value": f1}}}
        (tmp_path / "evaluation" / name).mkdir(parents=True)
        (tmp_path / "evaluation" / name / "metrics.json").write_text(
            json.dumps({"estimates": estimates})
        )
        (tmp_path / "adapters" / name).mkdir(parents=True)
    (tmp_path / "settings").write_text("budget=short\ndevice=cpu\nmodel=/x\nrl_lr=5e-5\nseed=2\n")
    assert ship(tmp_path, tmp_path / "shipped") == stages[-1]
    made = json.loads((tmp_path / "shipped" / "made.json").read_text())
    command = "BUDGET=short DEVICE=cpu SEED=2 bash example/smollm2/run.sh --set rl_lr=5e-5"
    assert made["command"] == command and "sft_start" not in made
    with (tmp_path / "settings").open("a") as settings:
        settings.write(f"sft_start={tmp_path / 'shipped'}\n")
    ship(tmp_path, tmp_path / "shipped")
    again = json.loads((tmp_path / "shipped" / "made.json").read_text())
    assert again["sft_start"] == made


@pytest.mark.slow
@pytest.mark.vllm_cpu
@pytest.mark.timeout(1500)
def test_the_whole_recipe_with_a_tiny_model(tmp_path: Path) -> None:
    """The recipe runs from questions to the table; the same command then skips all stages."""
    tiny_model(tmp_path / "model")
    recipe = Recipe(tmp_path)
    arguments = [
        "--set", f"model={tmp_path / 'model'}", "sft_steps=2", "sft_batch_size=2", "rl_steps=1",
        "rl_prompts=2", "rl_group=2", "rl_save_freq=1", "rl_val_rows=2", "eval_rows=2",
        "select_rows=2", "max_response_length=16",
        "rl_options=algorithm.filter_groups.enable=false",
    ]  # fmt: skip
    variables = {"PYTHON": sys.executable, "OUT": str(recipe.out), "DEVICE": "cpu",
                 "DATA_DIR": str(recipe.data)}  # fmt: skip
    command = ["bash", str(ROOT / "example" / "smollm2" / "run.sh"), *arguments]
    subprocess.run(command, env={**os.environ, **variables}, check=True)
    counts = json.loads((recipe.out / "data" / "dialogues.json").read_text())
    assert 0 < counts["dialogues"] <= counts["questions"] == len(QUESTIONS["train"]) - 2
    table = (recipe.out / "table.md").read_text()
    assert all(re.search(rf"\b{name}\b", table) for name in ("before", "sft", "rl", "rag"))
    again = subprocess.run(command, env={**os.environ, **variables}, check=True,
                           capture_output=True, text=True)  # fmt: skip
    assert again.stdout.count("finished before, skipped") == len(STAGES)
