"""Replacements for the groups of Ray actors that record the driver's calls."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.memory_tracker import MemoryTracker
from tests.verl.rollout.instant import InstantRollouts
from verl.batch import TokenBatch
from verl.config import Config
from verl.core_algos.kl import FixedKLController
from verl.monitor.tracking import Tracking
from verl.rewards.interface import Reward
from verl.trainer.build import Inputs, Parts
from verl.trainer.loop import RayPPOTrainer
from verl.training.devices import PeakMemory, card_name
from verl.types import Failure, Origin, Prompt, Sampling, Segment, Status, Trajectory


class RecordingReplicas(InstantRollouts):
    """Finishes trajectories at once: sample k of a prompt answers with k + 1 tokens."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.requests: list[tuple[list[Trajectory], Sampling]] = []
        self.fail = lambda start: False

    def generate(self, starts: Sequence[Trajectory], sampling: Sampling) -> list[Trajectory]:
        self.log.append("generate")
        self.requests.append((list(starts), sampling))
        return [self.answer(start) for start in starts]

    def answer(self, start: Trajectory) -> Trajectory:
        ids = tuple(range(10, 11 + start.sample))
        policy = Segment(Origin.POLICY, ids, "x", (-1.0,) * len(ids), self.version)
        observation = Segment(Origin.OBSERVATION, (7, 7), "doc")
        status = Status.FAILED if self.fail(start) else Status.ANSWERED
        return dataclasses.replace(
            start,
            segments=[*start.segments, policy, observation],
            status=status,
            failure=Failure("down"),
        )

    def update_weights(self, policy: object, version: int) -> dict[str, float]:
        self.log.append("update_weights")
        return super().update_weights(policy, version)


class RecordingRanks:
    """Returns zeros and keeps every mini-batch."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.mini_batches: list[TokenBatch] = []
        self.card = ""
        self.peak: PeakMemory | None = None

    def _zeros(self, name: str, batch: TokenBatch) -> torch.Tensor:
        self.log.append(name)
        return torch.zeros(batch.num_tokens)

    groups = ()

    @property
    def group(self) -> "RecordingRanks":
        return self

    def group_of(self, role: str) -> "RecordingRanks":
        return self

    def run(
        self, function: Callable[[Config], str], config: Config, on: Sequence[int]
    ) -> list[str]:
        """Run it as on ranks that compute in bfloat16."""
        trainer = dataclasses.replace(config.trainer, device="cpu", compute_dtype="bfloat16")
        own = dataclasses.replace(config, trainer=trainer)
        return [self.card if function is card_name else function(own)]

    def begin_forward(self, role: str, batch: TokenBatch) -> Callable[[], torch.Tensor]:
        names = {"actor": "log_probs", "reference": "ref_log_probs", "critic": "values"}
        result = self._zeros(names[role], batch)
        return lambda: result

    def update(self, role: str, mini: TokenBatch) -> dict[str, float]:
        self.log.append(f"update_{role}")
        self.mini_batches.append(mini)
        return {"actor/pg_loss": 0.0}

    def begin_updates(
        self, role: str, minis: Sequence[TokenBatch]
    ) -> Callable[[], list[dict[str, float]]]:
        self.log += [f"update_{role}"] * len(minis)
        return lambda: [{"critic/vf_loss": 0.0} for _ in minis]

    def save_checkpoint(self, directory: Path) -> None:
        self.log.append(f"save {directory.name.partition('.')[0]}")

    def can_copy_checkpoint(self) -> bool:
        return True

    def start_checkpoint(self, directory: Path) -> None:
        self.save_checkpoint(directory)

    def finish_checkpoint(self) -> None: ...

    def load_checkpoint(self, directory: Path) -> None:
        self.log.append(f"load {directory.name}")

    def take_peak_memory(self) -> PeakMemory | None:
        return self.peak

    def save_policy(self, directory: Path, dtype: str = "") -> None:
        directory.mkdir(parents=True, exist_ok=True)


def score_by_sample(trajectory: Trajectory) -> Reward:
    """Score 1 for odd samples."""
    score = float(trajectory.sample % 2)
    return Reward(score, {"em": score})


def prompts(count: int) -> list[Prompt]:
    """Return prompts of two data sets that use the same indices."""
    return [
        Prompt(f"{source}#{i}", (1, 2, 3), source, ("gold",), {"index": i})
        for i in range(count // 2)
        for source in ("nq", "hotpotqa")
    ]


def grpo_config(folder: Path, n_agent: int = 2) -> Config:
    """Return the options of a run in `folder`: GRPO on four prompts a step, saved at no step."""
    config = Config()
    config.trainer.default_local_dir = config.actor_rollout_ref.model.path = str(folder)
    config.trainer.save_freq = 0
    config.trainer.canary = False
    config.trainer.guard.action = "off"  # tested in test_guard_in_trainer.py
    config.data.train_batch_size = 4
    config.actor_rollout_ref.rollout.n_agent = n_agent
    config.algorithm.adv_estimator = "grpo"
    return config


def build_trainer(config: Config, log: list[str], **changes: Any) -> Any:
    """Build a trainer that records its calls in `log`; `changes` replace its arguments."""
    inputs: dict[str, Any] = {
        "train_prompts": prompts(8), "val_prompts": prompts(4), "total_steps": 0,
    }  # fmt: skip
    parts = {
        "ranks": RecordingRanks(log), "rollouts": RecordingReplicas(log), "reward": score_by_sample,
        "kl_controller": FixedKLController(0.001),
        "logger": Tracking("p", "e", [MemoryTracker()], config.trainer.default_local_dir),
    }  # fmt: skip
    own = {field.name for field in dataclasses.fields(Inputs)}
    inputs |= {name: value for name, value in changes.items() if name in own}
    parts |= {name: value for name, value in changes.items() if name not in own}
    return Parts(Inputs(config, **inputs), **parts).build()


def hook_of(trainer: RayPPOTrainer, kind: type[Any]) -> Any:
    """Return the trainer's hook of a kind."""
    return next(hook for hook in trainer.hooks if isinstance(hook, kind))
