"""Training from a record equals the recorded run, bit for bit, or is refused."""

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

from tests.compare import is_computed, same_weights
from tests.memory_tracker import MemoryTracker
from tests.runs.written import TOKENIZER
from tests.verl.rollout.instant import InstantRollouts
from tests.verl.trainer.local_run import local_ranks
from tests.verl.trainer.recording import prompts
from tests.verl.training.ranks import VOCAB, save_tiny, tiny_config
from verl.config import Config
from verl.core_algos.kl import FixedKLController
from verl.data.trajectories import SIGNALS, prepare_folder, step_path, write_jsonl, write_step
from verl.errors import ConfigError, DataError, UserError
from verl.ext.recorded import RecordedCollector, check_record
from verl.model_files import weights_fingerprint
from verl.monitor.performance import Timings
from verl.monitor.tracking import Tracking
from verl.rewards.interface import Reward
from verl.rollout.rollouts import TrainedRollouts
from verl.trainer.build import Inputs, Parts
from verl.types import Draw, Origin, Prompt, Sampling, Segment, Status, Trajectory


class RandomRollouts(InstantRollouts):
    """Finishes trajectories with random tokens and log-probs from their seeds."""

    def generate(self, starts: Sequence[Trajectory], sampling: Sampling) -> list[Trajectory]:
        return [self.finish_one(s, np.random.default_rng((s.seed or 0, 1))) for s in starts]

    def finish_one(self, start: Trajectory, random: np.random.Generator) -> Trajectory:
        def policy() -> Segment:
            ids = tuple(map(int, random.integers(0, VOCAB, size=random.integers(2, 6))))
            log_probs = tuple(-5.0 + float(x) for x in random.normal(size=len(ids)) / 3)
            return Segment(Origin.POLICY, ids, f"{ids}", log_probs, self.version)

        observation = Segment(Origin.OBSERVATION, (7, 7, 8), "doc\u2028")
        stats = {"turns": 2.0, "valid_searches": float(random.integers(3))}
        return dataclasses.replace(
            start, segments=[*start.segments, policy(), observation, policy()],
            status=Status.ANSWERED, stats=stats,
        )  # fmt: skip


def score(trajectory: Trajectory) -> Reward:
    """Return a score of many digits; equal within the groups of odd prompts."""
    seed = 7 if trajectory.prompt.uid.endswith("1") else trajectory.seed or 0
    value = float(np.random.default_rng(seed).normal()) / 3
    return Reward(value, {"em": value})


def learn(
    config: Config, engines: TrainedRollouts | None, num_steps: int
) -> list[dict[str, float]]:
    """Run the trainer; returns the metrics that depend only on the seed."""
    tracker = MemoryTracker()
    with local_ranks(config, num_steps) as ranks:
        train_prompts = prompts(8) if config.samples_rollouts else []
        Parts(
            Inputs(config, train_prompts, [], total_steps=num_steps), ranks, engines, score,
            FixedKLController(0.01),
            Tracking("p", "e", [tracker], config.trainer.default_local_dir),
        ).build().fit()  # fmt: skip
    return [{k: v for k, v in row.items() if is_computed(k)} for _, row in tracker.records]


def make_config(folder: Path, estimator: str = "grpo") -> Config:
    """Return options with KL in the loss and two updates, so that old log-probs are computed."""
    config = tiny_config(save_tiny(folder / "start"), adv_estimator=estimator)
    config.data.train_batch_size, config.actor_rollout_ref.rollout.n_agent = 4, 3
    config.actor_rollout_ref.actor.ppo_mini_batch_size = 6
    config.actor_rollout_ref.actor.state_masking = True
    trainer = config.trainer
    trainer.save_freq = trainer.test_freq = 0
    trainer.val_before_train = trainer.canary = False
    trainer.default_local_dir = str(folder / "run")
    trainer.rollout_data_dir = str(folder / "rollouts")
    # The engine of these tests makes log-probs up.
    config.trainer.guard.limits = {"mismatch_bound": None}
    return config


def as_recorded(config: Config, folder: Path) -> Config:
    """Return the options of the same run, trained from the record."""
    trainer = dataclasses.replace(
        config.trainer, rollout_data_dir=None, default_local_dir=str(folder / "offline")
    )
    data = dataclasses.replace(config.data, rollouts=str(folder / "rollouts"))
    return dataclasses.replace(config, trainer=trainer, data=data)


def unchanged(config: Config) -> None:
    """Keep the options as they are."""


def with_engine_log_probs(config: Config) -> None:
    """Use the engine's log-probs as the old ones, and replace groups of equal scores."""
    config.actor_rollout_ref.actor.old_log_probs = "engine"
    config.algorithm.filter_groups.enable = True
    config.algorithm.filter_groups.max_num_gen_batches = 3


def with_correction(config: Config) -> None:
    """Use truncated importance sampling, and KL in the reward."""
    actor = config.actor_rollout_ref.actor
    actor.rollout_correction = {"rollout_is": "token", "rollout_is_threshold": 1.5}
    actor.use_kl_loss = False
    config.algorithm.kl_ctrl.kl_coef = 0.01


def recorded_signals(path: Path) -> tuple[set[str], list[tuple[float, float, float | None]]]:
    """Return the names of a recorded step's signals, and three numbers for each policy token.

    These are the engine's log-prob, the trainer's log-prob and the correction weight.
    """
    names: set[str] = set()
    tokens: list[tuple[float, float, float | None]] = []
    for line in path.read_text().splitlines():
        for segment in json.loads(line)["segments"]:
            own = {name for name in SIGNALS if name in segment}
            assert segment["origin"] == "policy" or not own
            names |= own
            if "old_log_probs" in own:
                weights = segment.get("rollout_weights")
                if not isinstance(weights, list):  # one number if all tokens share it
                    weights = [weights] * len(segment["ids"])
                log_probs = segment["log_probs"], segment["old_log_probs"]
                tokens += zip(*log_probs, weights, strict=True)
    return names, tokens


COMPUTED = {"old_log_probs", "advantages"}


@pytest.mark.parametrize(
    ("estimator", "change", "num_steps", "names"),
    [
        ("grpo", unchanged, 1, {*COMPUTED, "ref_log_probs"}),
        ("grpo", with_engine_log_probs, 3, {"ref_log_probs", "advantages"}),
        ("gae", with_correction, 3, {*COMPUTED, "ref_log_probs", "values", "rollout_weights"}),
    ],
)
def test_a_recorded_step_is_the_step_that_was_sampled_to_the_bit(
    estimator: str, change: Callable[[Config], None], num_steps: int, names: set[str],
    tmp_path: Path,
) -> None:  # fmt: skip
    """From the same weights, without staleness, all computed metrics and the weights are equal.

    The record also has the token columns that the algorithm computes.
    """
    config = make_config(tmp_path, estimator)
    change(config)
    base = weights_fingerprint(config.actor_rollout_ref.model.path)
    prepare_folder(tmp_path / "rollouts", TOKENIZER, base)
    sampled = learn(config, RandomRollouts(), num_steps)
    found_names, tokens = recorded_signals(step_path(tmp_path / "rollouts", num_steps))
    assert found_names == names
    for engine, trainer, weight in tokens:
        assert weight is None or weight == pytest.approx(min(math.exp(trainer - engine), 1.5), 1e-5)
    offline = as_recorded(config, tmp_path)
    assert check_record(offline, TOKENIZER, done=0) == num_steps
    learned = learn(offline, None, num_steps)
    assert len(sampled) == num_steps and sampled == learned
    assert all(row["actor/grad_norm"] > 0 for row in learned)
    assert same_weights(tmp_path / "run" / "model", tmp_path / "offline" / "model")


def record(folder: Path, steps: Sequence[int] = (1, 2), size: int = 2, n: int = 2) -> Config:
    """Write a folder of recorded steps; returns the options of a run that can train from it."""
    rollouts = folder / "rollouts"
    prepare_folder(rollouts, TOKENIZER, "weights")
    for step in steps:
        trajectories = [
            Trajectory(
                Prompt(f"f#{group}", (1, 2), "nq", ("a",), {"question": "q", "day": 3}, "PP"),
                [Segment(Origin.PROMPT, (1, 2), "PP"),
                 Segment(Origin.POLICY, (3,), "x", (-0.1 - step,), step)],
                Status.ANSWERED, {"turns": 1.0}, draw=Draw(f"{step}/{group}", sample, 5),
            )
            for group in range(size) for sample in range(n)
        ]  # fmt: skip
        rewards = [Reward(t.sample / 3, {"em": 1.0}) for t in trajectories]
        write_step(rollouts, step, trajectories, rewards)
    config = Config()
    config.data.rollouts, config.data.train_batch_size = str(rollouts), size
    config.actor_rollout_ref.rollout.n_agent = n
    return config


def check(config: Config, model: str = "weights", done: int = 0) -> int:
    config.actor_rollout_ref.model.path = model  # a name of no folder is its own fingerprint
    return check_record(config, TOKENIZER, done)


def test_weights_are_compared_in_the_way_of_the_record(tmp_path: Path) -> None:
    """Records of before 2026-11-30 have another fingerprint of the same weights."""
    config, models = record(tmp_path), [tmp_path / "a", tmp_path / "b"]
    for number, model in enumerate(models):
        model.mkdir()
        (model / "model.safetensors").write_bytes(bytes([number]))
    before = weights_fingerprint(str(models[0]), "of before")
    prepare_folder(tmp_path / "rollouts", TOKENIZER, before)
    assert check(config, str(models[0])) == 2
    with pytest.raises(ConfigError, match="other weights"):
        check(config, str(models[1]))


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """Ids, masks, log-probs, versions, seeds, scores, and the fields that a reward reads."""
    config = record(tmp_path)
    samples, metrics = RecordedCollector(config, None).collect(2, Timings())  # type: ignore[arg-type]
    first = samples.trajectories[1]
    assert first == Trajectory(
        Prompt("f#0", (1, 2), "nq", ("a",), {"question": "q", "day": 3}, "PP"),
        [Segment(Origin.PROMPT, (1, 2), "PP"),
         Segment(Origin.POLICY, (3,), "x", (-2.1,), 2)],
        Status.ANSWERED, {"turns": 1.0}, draw=Draw("2/0", 1, 5),
    )  # fmt: skip
    assert samples.rewards[1] == Reward(1 / 3, {"em": 1.0})
    assert metrics["critic/score/max"] == 1 / 3 and metrics["rollout/answered"] == 1.0


def test_it_can_be_scored_again(tmp_path: Path) -> None:
    """The run's reward is called once with all trajectories."""
    config = record(tmp_path)
    config.data.rescore = True
    batch_sizes: list[int] = []

    def reward(trajectories: Sequence[Trajectory]) -> list[Reward]:
        batch_sizes.append(len(trajectories))
        return [Reward(9.0 + t.sample) for t in trajectories]

    samples, _ = RecordedCollector(config, reward).collect(1, Timings())  # type: ignore[arg-type]
    assert [r.score for r in samples.rewards] == [9.0, 10.0] * 2 and batch_sizes == [4]


def test_a_run_may_continue_from_a_checkpoint_of_the_recorded_one(tmp_path: Path) -> None:
    """Earlier steps may be missing; all later ones are trained on."""
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
    """It is refused before anything starts, with the file and the fix."""
    config = record(tmp_path)
    damage(tmp_path / "rollouts")
    with pytest.raises(DataError, match=says) as error:
        check(config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: setattr(c.actor_rollout_ref.rollout, "n_agent", 5),
         "n_agent: got 5, expected 2, as a group of step 1 of .*; fix: .*n_agent=2"),
        (lambda c: setattr(c.data, "train_batch_size", 8),
         "train_batch_size: got 8, expected 2, the prompts of step 1"),
        (lambda c: setattr(c.data, "train_batch_size", 1), "got 1, expected 2, the prompts"),
        (lambda c: setattr(c.trainer, "total_training_steps", 3), "not step 3"),
    ],
)  # fmt: skip
def test_options_of_another_run_are_one_clear_line(
    change: Callable[[Config], None], says: str, tmp_path: Path
) -> None:
    """The error names the value of the recorded run."""
    config = record(tmp_path)
    change(config)
    with pytest.raises(UserError, match=says) as error:
        check(config)
    assert "\n" not in str(error.value)


def test_older_weights_require_max_staleness(tmp_path: Path) -> None:
    """With it, the engine's log-probs are used to correct for them, and must be recorded."""
    config = record(tmp_path, steps=(1, 2, 3))
    rollouts = tmp_path / "rollouts"
    rows = [json.loads(line) for line in step_path(rollouts, 3).read_text().splitlines()]
    for row in rows:
        row["segments"][1] |= {"weight_version": 1, "log_probs": [None]}
    write_jsonl(step_path(rollouts, 3), rows)
    with pytest.raises(ConfigError, match="max_staleness=2"):
        check(config)
    config.actor_rollout_ref.rollout.max_staleness = 2
    with pytest.raises(ConfigError):
        check(config)
    config.actor_rollout_ref.actor.old_log_probs = "recompute"
    assert check(config) == 3


def test_other_models_are_refused(tmp_path: Path) -> None:
    """Another tokenizer always, other weights unless a correction is configured."""
    config = record(tmp_path)
    other_tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 0})
    with pytest.raises(ConfigError):
        check_record(config, other_tokenizer, 0)
    with pytest.raises(ConfigError, match="rollout_is=token"):
        check(config, model="other weights")
    config.actor_rollout_ref.actor.rollout_correction = {"rollout_is": "token"}
    assert check(config, model="other weights") == 2
