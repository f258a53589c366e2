"""Rewards in the trainer that change during the run, or fail."""

from pathlib import Path

import pytest

from search_r1.scoring import build_reward_manager
from tests.memory_tracker import MemoryTracker
from tests.verl.trainer.recording import build_trainer, grpo_config
from verl.config import Config
from verl.config.reward import PlateauConfig, StageConfig
from verl.errors import PluginError
from verl.monitor.tracking import Tracking
from verl.rewards.interface import EachAlone, Reward, RewardManager
from verl.rewards.stages import StagedReward
from verl.trainer.loop import RayPPOTrainer


def build(
    config: Config, total_steps: int, reward: RewardManager | None = None
) -> tuple[RayPPOTrainer, MemoryTracker]:
    """Build a run of two stages: score 1 until val/em has not risen twice, then score 2."""
    tracker = MemoryTracker()
    stages = [StageConfig("a", plateau=PlateauConfig("val/em", patience=2)), StageConfig("b")]

    def constant(score: float) -> EachAlone:
        return EachAlone(lambda t: Reward(score + t.sample, {"em": 0.5}))

    staged = StagedReward(stages, [constant(1.0), constant(2.0)])
    tracking = Tracking("p", "e", [tracker], config.trainer.default_local_dir)
    changes = {"reward": reward or staged, "logger": tracking, "total_steps": total_steps}
    return build_trainer(config, [], **changes), tracker


def config_of(folder: Path) -> Config:
    config = grpo_config(folder)
    config.trainer.save_freq, config.trainer.test_freq = 1, 1
    config.trainer.resume_mode = "auto"
    config.trainer.val_before_train = False
    return config


def stages_and_scores(tracker: MemoryTracker) -> list[tuple[float, float]]:
    return [(m["reward/stage"], m["critic/score/min"]) for _, m in tracker.records]


def test_stages_switch_on_validation_and_survive_a_resume(tmp_path: Path) -> None:
    """A validation metric ends the stage; an interrupted run has the same stages."""
    whole, tracker = build(config_of(tmp_path / "whole"), 5)
    whole.fit()
    expected = [(1, 1), (1, 1), (1, 1), (2, 2), (2, 2)]
    assert stages_and_scores(tracker) == expected
    first, before = build(config_of(tmp_path / "cut"), 2)
    first.fit()
    second, after = build(config_of(tmp_path / "cut"), 5)
    second.fit()
    assert stages_and_scores(before) + stages_and_scores(after) == expected


USER_REWARD = """from pathlib import Path
from search_r1.rewards import RewardOutput
def f(dialogue):
    seen = Path(__file__).with_name("seen")
    count = int(seen.read_text()) + 1 if seen.exists() else 1
    seen.write_text(str(count))
    score = float(count % 2)
    return BAD if count == 12 else RewardOutput(score, {"em": score})
"""


@pytest.mark.parametrize("bad", ["None", "float('nan')", "'0.5'", "1 / 0"])
def test_a_user_reward_that_fails_costs_its_step_only(tmp_path: Path, bad: str) -> None:
    """Step 1 is saved; with the function fixed, the same command continues with step 2."""
    config, file = config_of(tmp_path / "run"), tmp_path / "own.py"
    config.trainer.save_freq, config.trainer.test_freq = -1, -1
    config.reward_model.name = f"{file}:f"
    file.write_text(USER_REWARD.replace("BAD", bad))
    stopped, before = build(config, 2, build_reward_manager(config))
    message = r"own.py:f at \w+#\d: got .*; fix: .*; saved .*global_step_1: continue with the same"
    with pytest.raises(PluginError, match=message) as caught:
        stopped.fit()
    assert "\n" not in str(caught.value)
    file.write_text(USER_REWARD.replace("BAD", "0.0"))
    resumed, after = build(config, 2, build_reward_manager(config))
    resumed.fit()
    assert [step for step, _ in before.records + after.records] == [1, 2]
