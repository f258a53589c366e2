"""How the trainer deals with a reward that changes during the run."""

from pathlib import Path

from tests.memory_tracker import MemoryTracker
from tests.verl.trainer.recording import RecordingRanks, RecordingReplicas, prompts
from verl.config import Config
from verl.config.reward import PlateauConfig, StageConfig
from verl.core_algos.kl import FixedKLController
from verl.monitor.tracking import Tracking
from verl.rewards.interface import EachAlone, Reward
from verl.rewards.stages import Stage, StagedReward
from verl.trainer.ray_trainer import RayPPOTrainer


def build(config: Config, total_steps: int) -> tuple[RayPPOTrainer, MemoryTracker]:
    """A run of two stages: the first pays 1 until val/em stood still twice, the second 2."""
    tracker = MemoryTracker()
    stages = [StageConfig("a", plateau=PlateauConfig("val/em", patience=2)), StageConfig("b")]

    def paying(score: float) -> EachAlone:
        return EachAlone(lambda t: Reward(score + t.sample, {"em": 0.5}))

    pairs = zip(stages, (paying(1.0), paying(2.0)), strict=True)
    reward = StagedReward([Stage(options, paid) for options, paid in pairs])
    trainer = RayPPOTrainer(
        config=config,
        ranks=RecordingRanks([]),
        replicas=RecordingReplicas([]),
        train_prompts=prompts(8),
        val_prompts=prompts(4),
        reward_fn=reward,
        kl_controller=FixedKLController(0.001),
        tracking=Tracking("p", "e", [tracker], config.trainer.default_local_dir),
        total_steps=total_steps,
    )  # type: ignore[arg-type]
    return trainer, tracker


def config_of(folder: Path) -> Config:
    config = Config()
    config.trainer.default_local_dir = str(folder)
    config.actor_rollout_ref.model.path = str(folder)
    config.trainer.save_freq, config.trainer.test_freq = 1, 1
    config.trainer.resume_mode = "auto"
    config.trainer.val_before_train = False
    config.data.train_batch_size = 4
    config.actor_rollout_ref.rollout.n_agent = 2
    config.algorithm.adv_estimator = "grpo"
    return config


def stages_and_scores(tracker: MemoryTracker) -> list[tuple[float, float]]:
    return [(m["reward/stage"], m["critic/score/min"]) for _, m in tracker.records]


def test_stages_switch_on_validation_and_survive_a_resume(tmp_path: Path) -> None:
    """Validation's metric ends the stage; a run cut in two is staged like an uncut one."""
    whole, tracker = build(config_of(tmp_path / "whole"), 5)
    whole.fit()
    expected = [(1, 1), (1, 1), (1, 1), (2, 2), (2, 2)]
    assert stages_and_scores(tracker) == expected
    first, before = build(config_of(tmp_path / "cut"), 2)
    first.fit()
    second, after = build(config_of(tmp_path / "cut"), 5)
    second.fit()
    assert stages_and_scores(before) + stages_and_scores(after) == expected
