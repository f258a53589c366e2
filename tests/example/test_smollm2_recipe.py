"""The recipe's stages, settings and commands; one slow test plays it whole with a tiny model."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from example.smollm2 import __main__ as command
from example.smollm2 import evaluation, training
from example.smollm2.adapters import LIMIT_BYTES
from example.smollm2.evaluation import PLANS, Plan
from example.smollm2.recipe import ROOT, Recipe, Stage, play
from example.smollm2.settings import BUDGETS, Settings, estimate, settings_of
from example.tiny import tiny_model
from search_r1.evaluation.cli import parser as evaluation_parser
from search_r1.evaluation.options import EvaluationOptions
from tests.example.smollm2_world import UNANSWERABLE, write_data
from verl.config import cli
from verl.errors import ConfigError, DataError
from verl.sft import trainer as sft


def recipe_of(folder: Path, **others: object) -> Recipe:
    data = write_data(folder / "source")
    settings = settings_of("short", "cpu", data_dir=data, out=folder / "out", **others)
    return Recipe(settings, Console(file=io.StringIO()))


class Stages:
    """Stages that note that they ran; the one named `broken` fails once."""

    def __init__(self, broken: str = "") -> None:
        self.ran: list[str] = []
        self.broken = broken

    def run(self, recipe: Recipe, names: Sequence[str] = ("a", "b", "c")) -> list[str]:
        self.ran = []
        play(recipe, {name: self.stage(name) for name in "abc"}, names)
        return self.ran

    def stage(self, name: str) -> Stage:
        def note(recipe: Recipe) -> None:
            self.ran.append(name)
            if name == self.broken:
                self.broken = ""
                raise DataError("broken")

        return note


def test_finished_stages_are_skipped(tmp_path: Path) -> None:
    """A stage that was named alone is not repeated; a second run of all does nothing."""
    recipe, stages = recipe_of(tmp_path), Stages()
    assert stages.run(recipe, ["b"]) == ["b"]
    assert stages.run(recipe) == ["a", "c"]
    assert stages.run(recipe) == []


def test_a_failed_stage_runs_again_and_those_before_do_not(tmp_path: Path) -> None:
    """The run goes on with the stage that failed."""
    recipe, stages = recipe_of(tmp_path), Stages(broken="b")
    with pytest.raises(DataError):
        stages.run(recipe)
    assert stages.ran == ["a", "b"]
    assert stages.run(recipe) == ["b", "c"]


def test_a_folder_of_other_settings_is_refused(tmp_path: Path) -> None:
    """The setting and both values are named, and no stage runs."""
    stages = Stages()
    stages.run(recipe_of(tmp_path), ["a"])
    with pytest.raises(ConfigError, match=r"seed=3.*seed=0, as it began"):
        stages.run(recipe_of(tmp_path, seed=3))
    assert stages.ran == []


def test_settings_of_stages_to_come_may_change(tmp_path: Path) -> None:
    """GRPO's settings are free until it has left something, and are then what it began with."""
    stages = Stages()
    stages.run(recipe_of(tmp_path), ["a"])
    recipe = recipe_of(tmp_path, rl_steps=3)
    assert stages.run(recipe, ["b"]) == ["b"]
    (recipe.out / "rl").mkdir()
    assert stages.run(recipe, ["c"]) == ["c"]
    with pytest.raises(ConfigError, match=r"rl_steps=4.*rl_steps=3, as it began"):
        stages.run(recipe_of(tmp_path, rl_steps=4))


def test_a_folder_that_moved_is_gone_on_with(tmp_path: Path) -> None:
    """Where the run lies is none of its settings."""
    recipe, stages = recipe_of(tmp_path), Stages()
    stages.run(recipe)
    recipe.out.rename(tmp_path / "moved")
    settings = dataclasses.replace(recipe.settings, out=tmp_path / "moved")
    assert stages.run(Recipe(settings, recipe.console)) == []


def test_missing_data_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """The file that is missing and the way to name the folder are told."""
    recipe = recipe_of(tmp_path)
    (recipe.settings.data_dir / "dev.jsonl").unlink()
    with pytest.raises(DataError, match=r"dev\.jsonl.*small_hotpotqa\.py.*DATA_DIR"):
        Stages().run(recipe)
    assert not recipe.out.exists()


def test_the_short_budget_fits_an_hour_of_two_cores() -> None:
    """At the speeds that are assumed, all stages take at most 45 minutes; every stage counts."""
    expected = dict(estimate(settings_of("short", "cpu")))
    assert sum(expected.values()) <= 45
    assert list(expected) == command.UNASKED
    longer = dict(estimate(settings_of("short", "cpu", rl_steps=24)))
    assert longer["rl"] > 1.7 * expected["rl"]


def test_the_page_tells_the_estimates() -> None:
    """README.md's row of minutes is what the program prints."""
    page = (ROOT / "example" / "smollm2" / "README.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith("| estimate"))
    totals = [sum(minutes for _, minutes in estimate(settings_of(*key))) for key in BUDGETS]
    assert [int(n) for n in re.findall(r"\d+", row)] == [round(total) for total in totals]


def test_the_shipped_adapter_fits_its_limit() -> None:
    """Both ranks together, in bfloat16, over SmolLM2-135M's layers, by counting."""
    hidden, inner, key_value = 576, 1536, 192
    square, narrow, wide = 2 * hidden, hidden + key_value, hidden + inner
    numbers = 30 * (2 * square + 2 * narrow + 3 * wide)
    for budget, device in BUDGETS:
        settings = settings_of(budget, device)
        assert 2 * numbers * (settings.sft_rank + settings.rl_rank) < LIMIT_BYTES - 200_000


@pytest.mark.parametrize("budget", list(BUDGETS))
def test_every_option_is_one_that_the_programs_know(
    budget: tuple[str, str], tmp_path: Path
) -> None:
    """Cold start, GRPO and all evaluations accept what they are told, under each budget."""
    recipe = Recipe(settings_of(*budget, out=tmp_path))
    assert sft.parse(training.sft_options(recipe)).lora_rank == recipe.settings.sft_rank
    base = [f"actor_rollout_ref.model.path={recipe.out}", "algorithm.adv_estimator=grpo",
            "trainer.n_gpus_per_node=1"]  # fmt: skip
    config = cli.compose([*base, *training.rl_options(recipe)])
    assert config.data.max_prompt_length == recipe.settings.max_prompt_length
    assert config.trainer.guard.action == "rollback"
    for plan in PLANS:
        given = vars(
            evaluation_parser().parse_args(["run", *evaluation.options(recipe, plan, "x")])
        )
        options = {k: v for k, v in given.items() if k not in ("command", "act")}
        assert EvaluationOptions.given(options).method == plan.method


def test_evaluations_differ_only_in_what_they_compare(tmp_path: Path) -> None:
    """The controls have the trained agent's very options but for folder and retriever."""
    recipe = Recipe(settings_of("short", "cpu", out=tmp_path))
    trained = evaluation.options(recipe, Plan("rl", "rl"), "A")
    control = evaluation.options(recipe, Plan("rl-empty", "rl", "empty"), "empty")
    changed = [(a, b) for a, b in zip(trained, control, strict=True) if a != b]
    assert changed == [(f"{tmp_path}/evaluation/rl", f"{tmp_path}/evaluation/rl-empty"),
                       ("A", "empty")]  # fmt: skip


def test_the_shipped_command_makes_the_same_run(tmp_path: Path) -> None:
    """What was set beyond the budget is in it, and reading it gives the same settings."""
    recipe = Recipe(settings_from("--seed", "2", "--out", str(tmp_path), "--set",
                                  "eval_rows=null", "rl_lr=5e-5"))  # fmt: skip
    words = list(evaluation.command(recipe))
    assert words[:3] == ["BUDGET=short", "DEVICE=cpu", "SEED=2"]
    assert words[5:] == ["--set", "rl_lr=5e-05", "eval_rows=null"]
    assert settings_from("--seed", "2", "--out", str(tmp_path), *words[5:]) == recipe.settings


def settings_from(*words: str) -> Settings:
    return command.read_settings(command.parser().parse_args(["--device", "cpu", *words]))


def test_any_setting_can_be_changed() -> None:
    """`--set` wins over the budget; options of their own keep working."""
    found = settings_from("--seed", "3", "--set", "sft_lr=1e-4", "eval_rows=7")
    assert (found.seed, found.sft_lr, found.eval_rows) == (3, 1e-4, 7)
    assert settings_from("--budget", "full").eval_rows is None


def test_an_unknown_setting_is_refused() -> None:
    """The wrong key is named."""
    with pytest.raises(ConfigError, match="sft_rate"):
        settings_from("--set", "sft_rate=1")


def test_a_collapse_goes_on_from_the_newest_healthy_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are compared as numbers, and one without the guard's mark is not taken."""
    recipe = recipe_of(tmp_path)
    for step, is_healthy in ((9, True), (10, True), (20, False)):
        folder = recipe.out / "rl" / f"global_step_{step}"
        folder.mkdir(parents=True)
        if is_healthy:
            (folder / "HEALTHY").touch()
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(Recipe, "python", lambda _, *words: asked.append(words))
    training.export_healthy(recipe)
    assert Path(asked[0][3]).name == "global_step_10"
    assert asked[0][-1] == "--adapter"


@pytest.mark.slow
@pytest.mark.vllm_cpu
@pytest.mark.timeout(1500)
def test_the_whole_recipe_with_a_tiny_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From questions to a table and a shipped adapter; the same command then skips every stage."""
    tiny_model(tmp_path / "model")
    monkeypatch.setattr(evaluation, "SHIPPED", tmp_path / "shipped")
    words = [
        "--device", "cpu", "--data-dir", str(write_data(tmp_path / "source")),
        "--out", str(tmp_path / "out"), "--stage", *command.STAGES, "--set",
        f"model={tmp_path / 'model'}", "sft_steps=2", "sft_batch_size=2", "rl_steps=1",
        "rl_prompts=2", "rl_group=2", "rl_save_freq=1", "rl_val_rows=2", "eval_rows=2",
        "max_response_length=16",
    ]  # fmt: skip
    assert command.main(words) == 0
    out = tmp_path / "out"
    found = json.loads((out / "data" / "dialogues.json").read_text())
    assert found["dialogues"] == found["questions"] - len(UNANSWERABLE)
    table = (out / "table.md").read_text()
    assert all(re.search(rf"\b{plan.name}\b", table) for plan in PLANS)
    made = json.loads((tmp_path / "shipped" / "made.json").read_text())
    assert made["stage"] in ("sft", "rl") and "run.sh" in made["command"]
    assert (tmp_path / "shipped" / "adapter_model.safetensors").is_file()
    before = {file: file.stat().st_mtime_ns for file in out.rglob("*.json*")}
    assert command.main(words) == 0
    assert before == {file: file.stat().st_mtime_ns for file in out.rglob("*.json*")}
