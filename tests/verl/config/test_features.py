"""Options that ask for a file of `verl/ext` which was deleted."""

import ast
import shutil
import time
from pathlib import Path

import pytest

from tests.verl.config.test_cli import REQUIRED
from verl.config import Config, cli, features, known
from verl.config.features import FEATURES, PACKAGE, Feature
from verl.errors import ConfigError

VALUES = {
    "reward_model.stages": "[{name: em, until_step: 1}, {name: f1}]",
    "trainer.guard.limits": "{patience: 2}",
    "trainer.resume_anyway": "[data]",
    "trainer.max_restarts": "5",
    "trainer.trace": "true",
    "actor_rollout_ref.rollout.url": "http://127.0.0.1:9",
}
"""Values that need a feature, where 2 does not."""


def config_of(feature: Feature) -> Config:
    """Return the options of a run that asks for a feature."""
    value = VALUES.get(feature.option, feature.value or "2")
    more = ["actor_rollout_ref.rollout.n_agent=2"]
    if feature.option.endswith(".terms"):
        value = f"{{{feature.value}: 1}}"
    if feature.value == "teacher":
        more += ["actor_rollout_ref.actor.teacher={url: http://h, served_model: m}"]
    return cli.compose([*REQUIRED, *more, f"{feature.option}={value}"])


def copied(tmp_path: Path) -> Path:
    """Copy the optional files, without what they hold, and return their folder."""
    return shutil.copytree(
        PACKAGE, tmp_path / "ext", copy_function=lambda _, path: Path(path).touch()
    )


@pytest.mark.parametrize("feature", FEATURES, ids=lambda f: f"{f.option}={f.value}")
def test_each_file_that_an_option_needs_is_named(
    feature: Feature, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that git leaves behind does not count; without options nothing is needed."""
    config, folder = config_of(feature), copied(tmp_path)
    monkeypatch.setattr(features, "PACKAGE", folder)
    assert list(features.problems(config)) == []
    for name in feature.files:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        if not path.suffix:
            path.mkdir()
    found = list(features.problems(config))
    assert [line.partition(":")[0] for line in found] == [feature.option] * len(feature.files)
    for line, name in zip(found, feature.files, strict=True):
        assert f"git checkout HEAD -- verl/ext/{name}" in line
    shutil.rmtree(folder)
    assert list(features.problems(Config())) == []


def test_an_answer_takes_no_two_seconds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing slow is imported before it, and all that is lacking is named."""
    monkeypatch.setattr(features, "PACKAGE", tmp_path)
    start = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        known.check(cli.compose([*REQUIRED, "trainer.trace=true", "trainer.logger=[wandb]"]))
    assert time.monotonic() - start < 2
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()] == [
        "trainer.trace", "trainer.logger"]  # fmt: skip


def test_what_a_feature_imports_is_listed() -> None:
    """So that a run which asks for it does not fail later, on a file that no option names."""
    for feature in FEATURES:
        paths = [PACKAGE / file for file in feature.files]
        listed = {file for path in paths for file in ([path] if path.suffix else path.glob("*.py"))}
        for file in listed:
            assert imported_of_ext(file) <= listed, f"{file.name} of {feature.option}"


def imported_of_ext(source: Path) -> set[Path]:
    """Return the files of `verl/ext` that a file imports, without those that only hold a name."""
    found = set()
    for node in ast.walk(ast.parse(source.read_text())):
        module = getattr(node, "module", None) or ""
        if isinstance(node, ast.ImportFrom) and module.startswith("verl.ext"):
            path = PACKAGE.joinpath(*module.split(".")[2:])
            paths = [path.with_suffix(".py"), *(path / f"{x.name}.py" for x in node.names)]
            found |= {path for path in paths if path.exists()}
    return found
