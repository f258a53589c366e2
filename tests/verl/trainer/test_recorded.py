"""Learning from a record: it is the run that was recorded, to the bit, or it is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.memory_tracker import MemoryTracker
from tests.proofs.kills.compare import is_computed, same_weights
from tests.verl.trainer.local_run import local_ranks
from tests.verl.trainer.recording import prompts
from tests.verl.training.ranks import VOCAB, save_tiny, tiny_config
from tests.view.runs import TOKENIZER
from verl.config import Config
from verl.core_algos.kl import FixedKLController
from verl.data.trajectories import SIGNALS, prepare_folder, step_path, write_jsonl, write_step
from verl.errors import ConfigError, DataError, UserError
from verl.monitor.tracking import Tracking
from verl.rewards.interface import Reward
from verl.rollout.pool import NullRolloutPool, RolloutPool
from verl.trainer.metrics import Timings
from verl.trainer.ray_trainer import RayPPOTrainer
from verl.trainer.recorded import RecordedCollector, check_record
from verl.types import Origin, Prompt, Sampling, Segment, Status, Trajectory


class Babbling(RolloutPool):
    """Says what the seed says, with log-probs that no model would give twice."""

    dtype, version = "float32", 0

    def generate(self, starts: Sequence[Trajectory], sampling: Sampling) -> list[Trajectory]:
        return [self.speak(start, np.random.default_rng((start.seed or 0, 1))) for start in starts]

    def speak(self, start: Trajectory, random: np.random.Generator) -> Trajectory:
        def spoken() -> Segment:
            ids = tuple(map(int, random.integers(0, VOCAB, size=random.integers(2, 6))))
            told = tuple(-5.0 + float(x) for x in random.normal(size=len(ids)) / 3)
            return Segment(Origin.POLICY, ids, f"{ids}", told, self.version)

        seen = Segment(Origin.OBSERVATION, (7, 7, 8), "doc\u2028")
        stats = {"turns": 2.0, "valid_searches": float(random.integers(3))}
        return dataclasses.replace(
            start, segments=[*start.segments, spoken(), seen, spoken()],
            status=Status.ANSWERED, stats=stats,
        )  # fmt: skip

    def update_weights(self, ranks: object) -> dict[str, float]:
        self.version += 1
        return {}

    def sleep(self) -> None: ...

    def wake_up(self) -> None: ...


def score(trajectory: Trajectory) -> Reward:
    """A number of many digits; the same for whole groups of odd prompts."""
    seed = 7 if trajectory.prompt.uid.endswith("1") else trajectory.seed or 0
    value = float(np.random.default_rng(seed).normal()) / 3
    return Reward(value, {"em": value})


def learn(config: Config, engines: RolloutPool, num_steps: int) -> list[dict[str, float]]:
    """A whole run; what the seed alone determines of its metrics."""
    tracker = MemoryTracker()
    with local_ranks(config, num_steps) as ranks:
        RayPPOTrainer(
            config=config, ranks=ranks, replicas=engines,  # type: ignore[arg-type]
            train_prompts=prompts(8) if config.samples_rollouts else [], val_prompts=[],
            reward_fn=score, kl_controller=FixedKLController(0.01), total_steps=num_steps,
            tracking=Tracking("p", "e", [tracker], config.trainer.default_local_dir),
        ).fit()  # fmt: skip
    return [{k: v for k, v in row.items() if is_computed(k)} for _, row in tracker.records]


def make_config(folder: Path, estimator: str = "grpo") -> Config:
    """Two updates a step, so that the old policy is looked at, and KL in the loss."""
    config = tiny_config(save_tiny(folder / "start"), adv_estimator=estimator)
    config.data.train_batch_size, config.actor_rollout_ref.rollout.n_agent = 4, 3
    config.actor_rollout_ref.actor.ppo_mini_batch_size = 6
    config.actor_rollout_ref.actor.state_masking = True
    trainer = config.trainer
    trainer.save_freq = trainer.test_freq = 0
    trainer.val_before_train = False
    trainer.default_local_dir = str(folder / "run")
    trainer.rollout_data_dir = str(folder / "rollouts")
    return config


def as_recorded(config: Config, folder: Path) -> Config:
    """The same run, offline."""
    trainer = dataclasses.replace(
        config.trainer, rollout_data_dir=None, default_local_dir=str(folder / "offline")
    )
    data = dataclasses.replace(config.data, rollouts=str(folder / "rollouts"))
    return dataclasses.replace(config, trainer=trainer, data=data)


def plain(config: Config) -> None:
    """The options as they are."""


def by_engine(config: Config) -> None:
    """The engine's log-probs are the old ones, and groups of equal scores are replaced."""
    config.actor_rollout_ref.actor.old_log_probs = "engine"
    config.algorithm.filter_groups.enable = True
    config.algorithm.filter_groups.max_num_gen_batches = 3


def corrected(config: Config) -> None:
    """Truncated importance sampling, and KL in the reward."""
    actor = config.actor_rollout_ref.actor
    actor.rollout_is, actor.rollout_is_threshold, actor.use_kl_loss = "token", 1.5, False
    config.algorithm.kl_ctrl.kl_coef = 0.01


def known_of_tokens(path: Path) -> tuple[set[str], list[tuple[float, float, float | None]]]:
    """The names of what a recorded step says beside the engine's log-probs; and of each sampled
    token the engine's log-prob, the trainer's and the correction."""
    names: set[str] = set()
    tokens: list[tuple[float, float, float | None]] = []
    for line in path.read_text().splitlines():
        for one in json.loads(line)["segments"]:
            own = {name for name in SIGNALS if name in one}
            assert one["origin"] == "policy" or not own
            names |= own
            if "old_log_probs" in own:
                weights = one.get("rollout_weights", [None] * len(one["ids"]))
                many = weights if isinstance(weights, list) else [weights] * len(one["ids"])
                tokens += zip(one["log_probs"], one["old_log_probs"], many, strict=True)
    return names, tokens


LOOKED = {"old_log_probs", "advantages"}


@pytest.mark.parametrize(
    ("estimator", "change", "num_steps", "names"),
    [
        ("grpo", plain, 1, {*LOOKED, "ref_log_probs"}),
        ("grpo", by_engine, 3, {"ref_log_probs", "advantages"}),
        ("gae", corrected, 3, {*LOOKED, "ref_log_probs", "values", "rollout_weights"}),
        ("remax", plain, 1, {*LOOKED, "ref_log_probs"}),
    ],
)
def test_a_recorded_step_is_the_step_that_was_sampled_to_the_bit(
    estimator: str,
    change: Callable[[Config], None],
    num_steps: int,
    names: set[str],
    tmp_path: Path,
) -> None:
    """From the same weights, with lag 0: every metric that is computed, and the weights.

    The record also has what the trainer found of the tokens: what its algorithm looks at.
    """
    config = make_config(tmp_path, estimator)
    change(config)
    prepare_folder(tmp_path / "rollouts", TOKENIZER)
    sampled = learn(config, Babbling(), num_steps)
    found, tokens = known_of_tokens(step_path(tmp_path / "rollouts", num_steps))
    assert found == names
    for engine, trainer, weight in tokens:
        assert weight is None or weight == pytest.approx(min(math.exp(trainer - engine), 1.5), 1e-5)
    offline = as_recorded(config, tmp_path)
    assert check_record(offline, TOKENIZER, "", done=0) == num_steps
    learned = learn(offline, NullRolloutPool("float32"), num_steps)
    assert len(sampled) == num_steps and sampled == learned
    assert all(row["actor/grad_norm"] > 0 for row in learned)
    assert same_weights(tmp_path / "run" / "model", tmp_path / "offline" / "model")


def record(folder: Path, steps: Sequence[int] = (1, 2), size: int = 2, n: int = 2) -> Config:
    """A folder of recorded steps, and the options of a run that may learn from it."""
    rollouts = folder / "rollouts"
    prepare_folder(rollouts, TOKENIZER, "weights")
    for step in steps:
        trajectories = [
            Trajectory(
                Prompt(f"f#{group}", (1, 2), "nq", ("a",), {"question": "q", "day": 3}, "PP"),
                [Segment(Origin.PROMPT, (1, 2), "PP"),
                 Segment(Origin.POLICY, (3,), "x", (-0.1 - step,), step)],
                Status.ANSWERED, {"turns": 1.0}, group=f"{step}/{group}", sample=sample, seed=5,
            )
            for group in range(size) for sample in range(n)
        ]  # fmt: skip
        rewards = [Reward(one.sample / 3, {"em": 1.0}) for one in trajectories]
        write_step(rollouts, step, trajectories, rewards)
    config = Config()
    config.data.rollouts, config.data.train_batch_size = str(rollouts), size
    config.actor_rollout_ref.rollout.n_agent = n
    return config


def check(config: Config, model: str = "weights", done: int = 0) -> int:
    return check_record(config, TOKENIZER, model, done)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """Ids, masks, log-probs, versions, seeds, scores, and what a reward reads."""
    config = record(tmp_path)
    samples, metrics = RecordedCollector(config, None).collect(2, Timings())  # type: ignore[arg-type]
    first = samples.trajectories[1]
    assert first == Trajectory(
        Prompt("f#0", (1, 2), "nq", ("a",), {"question": "q", "day": 3}, "PP"),
        [Segment(Origin.PROMPT, (1, 2), "PP"),
         Segment(Origin.POLICY, (3,), "x", (-2.1,), 2)],
        Status.ANSWERED, {"turns": 1.0}, group="2/0", sample=1, seed=5,
    )  # fmt: skip
    assert samples.rewards[1] == Reward(1 / 3, {"em": 1.0})
    assert metrics["critic/score/max"] == 1 / 3 and metrics["rollout/answered"] == 1.0


def test_it_can_be_scored_anew(tmp_path: Path) -> None:
    """By the reward of the run, of all trajectories at once."""
    config = record(tmp_path)
    config.data.rescore = True
    asked: list[int] = []

    def reward(trajectories: Sequence[Trajectory]) -> list[Reward]:
        asked.append(len(trajectories))
        return [Reward(9.0 + one.sample) for one in trajectories]

    samples, _ = RecordedCollector(config, reward).collect(1, Timings())  # type: ignore[arg-type]
    assert [one.score for one in samples.rewards] == [9.0, 10.0] * 2 and asked == [4]


def test_a_run_may_go_on_from_a_checkpoint_of_the_recorded_one(tmp_path: Path) -> None:
    """Steps before it need not be there, and all until the last are learned from."""
    config = record(tmp_path, steps=(3, 4, 5))
    assert check(config, done=2) == 5
    config.trainer.total_training_steps = 4
    assert check(config, done=2) == 4


def cut_in_a_line(folder: Path) -> None:
    path = step_path(folder, 2)
    path.write_bytes(path.read_bytes()[:-30])


def cut_after_a_line(folder: Path) -> None:
    path = step_path(folder, 2)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def of_an_earlier_version(folder: Path) -> None:
    rows = [json.loads(line) for line in step_path(folder, 1).read_text().splitlines()]
    write_jsonl(step_path(folder, 1), [{k: v for k, v in r.items() if k != "seed"} for r in rows])


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: shutil.rmtree(folder), "rollouts: got .*a folder with run.json"),
        (lambda folder: [p.unlink() for p in folder.glob("step_*")], "without any step"),
        (lambda folder: step_path(folder, 1).unlink(),
         "has 1 steps, and not step 1, expected every step from 1 to 2; fix: restore it$"),
        (lambda folder: step_path(folder, 1).write_text(""),
         "0 trajectories, expected a whole step"),
        (cut_in_a_line, "step_00000002.jsonl, row 3"),
        (cut_after_a_line, "got 3 trajectories, expected the 4 that the step had; fix: copy"),
        (of_an_earlier_version, "line 1: got KeyError 'seed'.*record again"),
    ],
)  # fmt: skip
def test_a_damaged_record_is_one_clear_line(
    damage: Callable[[Path], object], says: str, tmp_path: Path
) -> None:
    """It is refused before anything starts, with the file and what mends it."""
    config = record(tmp_path)
    damage(tmp_path / "rollouts")
    with pytest.raises(DataError, match=says) as told:
        check(config)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: setattr(c.actor_rollout_ref.rollout, "n_agent", 5),
         "n_agent: got 5, expected 2, as a group of step 1 of .*; fix: .*n_agent=2"),
        (lambda c: setattr(c.data, "train_batch_size", 8),
         "train_batch_size: got 8, expected 2, the prompts of step 1"),
        (lambda c: setattr(c.data, "train_batch_size", 1), "got 1, expected 2, the prompts"),
        (lambda c: setattr(c.trainer, "total_training_steps", 3), "not step 3"),
        (lambda c: setattr(c.algorithm, "adv_estimator", "remax"), "without scores of greedy"),
    ],
)  # fmt: skip
def test_options_of_another_run_are_one_clear_line(
    change: Callable[[Config], None], says: str, tmp_path: Path
) -> None:
    """The one that the record has is named."""
    config = record(tmp_path)
    change(config)
    with pytest.raises(UserError, match=says) as told:
        check(config)
    assert "\n" not in str(told.value)


def test_older_weights_want_the_option_that_says_so(tmp_path: Path) -> None:
    """With it the engine's log-probs correct for them, and must be there."""
    config = record(tmp_path, steps=(1, 2, 3))
    rollouts = tmp_path / "rollouts"
    rows = [json.loads(line) for line in step_path(rollouts, 3).read_text().splitlines()]
    for row in rows:
        row["segments"][1] |= {"weight_version": 1, "log_probs": [None]}
    write_jsonl(step_path(rollouts, 3), rows)
    with pytest.raises(ConfigError, match=r"2 versions old.*fix: .*max_staleness=2"):
        check(config)
    config.actor_rollout_ref.rollout.max_staleness = 2
    with pytest.raises(ConfigError, match="whose engine reported no log-probs"):
        check(config)
    config.actor_rollout_ref.actor.old_log_probs = "recompute"
    assert check(config) == 3


def test_other_models_are_refused(tmp_path: Path) -> None:
    """Of another tokenizer always; other weights learn with a correction alone."""
    config = record(tmp_path)
    others = SimpleNamespace(get_vocab=lambda: {"a": 0})
    with pytest.raises(ConfigError, match="ids of another tokenizer"):
        check_record(config, others, "weights", 0)
    with pytest.raises(ConfigError, match=r"expected the weights that sampled.*rollout_is=token"):
        check(config, model="others")
    config.actor_rollout_ref.actor.rollout_is = "token"
    assert check(config, model="others") == 2
