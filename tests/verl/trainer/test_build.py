"""The hooks of a run: the user's, and those of optional modules, of which each may be missing."""

import re
from pathlib import Path

import pytest

from tests.memory_tracker import MemoryTracker
from tests.verl.trainer.recording import (
    RecordingRanks,
    build_trainer,
    grpo_config,
    hook_of,
    prompts,
)
from verl import seams
from verl.config import Config
from verl.errors import ConfigError, Interrupted, PluginError
from verl.monitor.tracking import Tracking
from verl.trainer import build
from verl.trainer.export import Export
from verl.trainer.hooks import Hook

GUIDE = Path(__file__).resolve().parents[3] / "docs/guides/watching.md"


def run_with_hook(
    folder: Path, source: str, num_steps: int = 2
) -> list[tuple[int, dict[str, float]]]:
    """Run some steps with the hook `MyHook` of a file; returns what was logged."""
    path, tracker = folder / f"hook_{num_steps}.py", MemoryTracker()
    path.write_text(source)
    config = with_hooks(folder / "run", f"{path}:MyHook")
    config.trainer.save_freq, config.trainer.resume_mode = 1, "auto"
    config.trainer.val_before_train, config.trainer.test_freq = False, 0
    logger = Tracking("p", "e", [tracker], config.trainer.default_local_dir)
    build_trainer(config, [], train_prompts=prompts(8), total_steps=num_steps, logger=logger).fit()
    return list(tracker.records)


def with_hooks(folder: Path, *names: str) -> Config:
    config = grpo_config(folder)
    config.trainer.hooks = list(names)
    return config


def test_the_hook_of_the_guide_adds_its_metric_and_keeps_its_state(tmp_path: Path) -> None:
    """Its code is read from the page; a resumed run continues with the state of the checkpoint."""
    guide = GUIDE.read_text().partition("## A hook of your own")[2]
    [source] = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    first = run_with_hook(tmp_path, source)
    assert [row["my/longest"] > 0 for step, row in first if step > 0] == [True, True]
    grown = source.replace('state.others.get("my_hook", 0)', '1000 + state.others["my_hook"]')
    ((_, row),) = run_with_hook(tmp_path, grown, num_steps=3)[-1:]
    assert row["my/longest"] == 1000 + first[-1][1]["my/longest"]


@pytest.mark.parametrize("name", ["step", "pending", "guard", "sampler"])
def test_a_hook_cannot_take_a_name_of_the_trainers_state(tmp_path: Path, name: str) -> None:
    """Otherwise a resumed run would read the hook's value as its own, or could not start."""
    source = (
        "from verl.trainer.hooks import Hook\n\n\nclass MyHook(Hook):\n"
        "    def __init__(self, config): ...\n"
        f"    def state_dict(self): return {{{name!r}: 7}}\n"
    )
    with pytest.raises(PluginError, match=rf"MyHook: got {name}"):
        run_with_hook(tmp_path, source)


def test_a_hook_may_end_the_run_before_its_first_step(tmp_path: Path) -> None:
    """Its error says that nothing was learned yet."""
    source = (
        "from verl.errors import Interrupted\nfrom verl.trainer.hooks import Hook\n\n\n"
        "class MyHook(Hook):\n    def __init__(self, config): ...\n"
        "    def on_start(self, trainer): raise Interrupted('not today')\n"
    )
    with pytest.raises(Interrupted, match="not today"):
        run_with_hook(tmp_path, source)


def test_what_is_no_hook_is_refused(tmp_path: Path) -> None:
    """A wrong name, a wrong class and a hook that cannot be built, each with the option's name."""
    path = tmp_path / "wrong.py"
    path.write_text("class Other:\n    def __init__(self, config): pass\n"
                    "class Late(Other):\n    on_step_end = None\n"
                    "class Broken:\n    def __init__(self, config): raise OSError\n")  # fmt: skip
    for name in (f"{path}:Other", f"{path}:Late", f"{path}:Broken", f"{path}:Missing", "speed"):
        with pytest.raises(ConfigError, match=r"trainer\.hooks"):
            list(build.user_hooks(with_hooks(tmp_path, name)))


@pytest.mark.parametrize(("option", "expected"), [("auto", "bfloat16"), ("float32", "float32")])
def test_weights_are_written_in_the_format_of_the_ranks_devices(
    tmp_path: Path, option: str, expected: str
) -> None:
    """A driver without a GPU, as on a cluster's head node, does not decide for ranks with one."""
    config, ranks = grpo_config(tmp_path), RecordingRanks([])
    config.trainer.device, config.actor_rollout_ref.rollout.dtype = "cuda", option
    ranks.card = "a card that the driver lacks"  # and that computes in bfloat16
    trainer = build_trainer(config, [], ranks=ranks)
    assert hook_of(trainer, Export).dtype == expected


def test_a_deleted_module_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The others are built, and a warning names it."""
    monkeypatch.setattr(
        seams, "HOOKS", ("verl.ext.gone", "verl.ext.gone.hook", "verl.trainer.validate")
    )
    trainer = build_trainer(grpo_config(tmp_path), [])
    assert [type(hook).__name__ for hook in trainer.hooks] == ["Validation"]
    assert all(isinstance(hook, Hook) for hook in trainer.hooks)
    assert "verl.ext.gone" in caplog.text
