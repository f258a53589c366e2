"""The training algorithm, run by one driver process; `fit()` reads as the paper.

A step samples a group of trajectories per prompt, scores them, turns scores into advantages,
updates critic and policy, and brings the new weights into the engines. The trainer knows nothing
about tools: agents run inside the rollout replicas, and the reward is a function it is given.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from verl.agent.environment import Environment
from verl.agent.wording import TEMPLATE_FILE, is_file
from verl.checkpoint import folders, prefetched
from verl.checkpoint.folders import RunState, read_driver_random
from verl.checkpoint.saver import LOST_RANK_TIMEOUT_S, SavePlan, Saver, is_due
from verl.config import Config
from verl.core_algos.kl import KLController
from verl.errors import (
    CollapseError,
    Interrupted,
    PluginError,
    RankLost,
    ReplicaLost,
    ResourceError,
    SaveError,
    ToolOutage,
    ToolRefused,
)
from verl.files import is_file_error
from verl.monitor.guard import CollapseGuard, Verdict
from verl.monitor.performance import Timings, critic_seconds, speed_metrics
from verl.monitor.trace import Trace
from verl.monitor.tracking import Tracking
from verl.rewards.interface import RewardFn, RewardManager, adapted
from verl.rollout.pool import NullRolloutPool, RetryingRollout
from verl.rollout.replicas import RolloutReplicas
from verl.steady import one_thread, steady_memory
from verl.trainer.cluster import uses_gpus
from verl.trainer.collection import Samples
from verl.trainer.learning import Learner, add_advantages, assemble, token_signals
from verl.trainer.metrics import (
    advantage_metrics,
    busy_metrics,
    staleness_metrics,
    throughput_metrics,
)
from verl.trainer.ranks import TrainerRanks
from verl.trainer.recorded import collector_of
from verl.trainer.stopping import Stopper, end_of_time
from verl.trainer.validation import validate
from verl.training.checkpoint_files import checkpoint_errors
from verl.training.weights import copy_tokenizer
from verl.types import Metrics, Prompt, TokenBatch

logger = logging.getLogger(__name__)


@dataclass
class RayPPOTrainer:
    """PPO, GRPO and the like over a group of training ranks and a group of rollout replicas."""

    config: Config
    ranks: TrainerRanks
    replicas: RolloutReplicas | NullRolloutPool
    train_prompts: Sequence[Prompt]
    val_prompts: Sequence[Prompt]
    reward_fn: RewardFn | RewardManager
    kl_controller: KLController
    tracking: Tracking
    total_steps: int
    environment: Environment = field(default_factory=Environment)
    """The agents' tools: waited for when they do not answer, described in the exported model."""
    faults: Callable[[], Metrics] = dict
    """Counts of lost processes so far, for the metrics of each step."""
    identity: Mapping[str, Any] = field(default_factory=dict)
    """Configuration and fingerprints, kept with each checkpoint (`checkpoint.resume`)."""
    step: int = 0
    best: Mapping[str, Any] | None = None
    """`metric`, `value` and `step` of the best validation so far."""
    finished: RunState = field(init=False)
    """Where the run stood after the last finished step, which is what a checkpoint holds."""

    def __post_init__(self) -> None:
        self.directory = Path(self.config.trainer.default_local_dir)
        self.saver = Saver(
            self.config.trainer, self.directory, self.ranks, self.identity,
            protected=lambda: self.guard.protected_steps,
            on_lost=lambda step: self.guard.drop_pending(step),
        )  # fmt: skip
        self.save_plan = SavePlan(self.config.trainer, self.total_steps)
        self.stopper = Stopper(end_of_time(self.config.trainer.time_limit), self.saver.expected_s)
        self.guard = CollapseGuard(
            self.config.trainer.guard, self.directory, self.saver.finish_pending
        )
        self.learner = Learner(self.config, self.ranks)
        self.peak_flops = self.ranks.peak_flops()
        self.trace = Trace(self.directory if self.config.trainer.trace else None)
        self.untraced: tuple[Any, ...] | None = None
        self.reward = adapted(self.reward_fn)
        self.rollout = RetryingRollout(
            self.replicas, self.environment, self.stopper.check,
            expected_identity=self.identity.get("fingerprints", {}),
        )  # fmt: skip
        self.collector = collector_of(
            self.config, self.rollout, self.train_prompts, self.reward,
            with_greedy=self.learner.estimator.needs_greedy, last_step=self.total_steps,
        )  # fmt: skip
        self.finished = self.state()

    def fit(self) -> None:
        """Train to `total_steps` updates, validating and saving on the way.

        Raises Interrupted, ToolOutage, ToolRefused and PluginError when the last finished step was
        saved, and CollapseError.
        """
        with steady_memory(), self.stopper.listening(), self.saving_what_is_finished():
            trainer = self.config.trainer
            self.resume()
            self.update_weights()
            if trainer.val_only or (trainer.val_before_train and self.step == 0):
                self.tracking.log(self.validate(), self.step)
            if trainer.val_only:
                return
            if self.guard.needs_initial_checkpoint:
                self.save_trusted()
            self.train()
            self.export()
            self.saver.finish_pending(is_final=True)

    def train(self) -> None:
        """The steps that are left."""
        if self.finished.pending is not None:
            self.conclude(dict(self.finished.pending))
        with tqdm(total=self.total_steps, initial=self.step, desc="train", unit="step") as bar:
            while self.step < self.total_steps:
                self.stopper.check()
                self.saver.poll()
                with self.stopper.timing_step():
                    self.step += 1
                    metrics = self.train_step()
                    verdict = self.guard.judge(self.step, metrics)
                    must_recover = self.guard.requires_action(verdict)
                    if must_recover:
                        self.recover(verdict, metrics)
                    self.conclude(metrics, must_recover)
                score = f"{metrics['critic/score/mean']:.3f}"
                bar.set_postfix({"score": score, **self.spent(bar)})
                bar.update()
                gc.collect()  # here alone (`steady_memory`), where the step's objects are gone

    def spent(self, bar: tqdm[NoReturn]) -> dict[str, str]:
        """GPU-hours since the start, and those until the end at this pace; nothing on CPU."""
        if not uses_gpus(self.config):
            return {}
        hours = self.config.num_gpus * bar.format_dict["elapsed"] / 3600
        share = (self.step - bar.initial) / (self.total_steps - bar.initial)
        return {"gpu_h": f"{hours:.2f}/{hours / share:.2f}"}

    def conclude(self, metrics: Metrics, was_recovered: bool = False) -> None:
        """End a step whose weights are final: validate, log, save."""
        self.finished, score = self.state(pending=metrics), None
        self.add_to_trace()  # not before: a full disk ends the run with what is finished
        if is_due(self.config.trainer.test_freq, self.step, self.total_steps):
            metrics |= self.validate()
            score = self.note_best(metrics)
        metrics |= self.reward.observe(self.step, metrics)
        self.tracking.log(metrics, self.step)
        self.finished = self.state(score=score)
        if was_recovered:
            self.save_trusted()
        elif self.save_plan.is_due(self.step):
            self.save()

    def add_to_trace(self) -> None:
        """Write what the last step did when, once."""
        if self.untraced is not None:
            self.trace.add_step(*self.untraced)
            self.untraced = None

    def note_best(self, metrics: Metrics) -> float | None:
        """The best metric's value at this step, remembered if it is the highest so far."""
        name = self.config.trainer.best_metric
        score = metrics.get(name)
        if score is None:
            known = ", ".join(sorted(key for key in metrics if key.startswith("val/")))
            logger.warning("trainer.best_metric: no %s was measured, only %s", name, known)
        elif self.best is None or score > self.best["value"]:
            self.best = {"metric": name, "value": score, "step": self.step}
        return score

    def train_step(self) -> Metrics:
        """One step: sample, score, estimate advantages, update, sync the weights."""
        timings = Timings(self.ranks.take_peak_memory)
        with self.stopper.interruptible():
            samples, metrics = self.collector.collect(self.step, timings)
        with one_thread():
            batch = assemble(samples, self.config)
            with self.recording(samples, batch, timings):
                self.learner.compute_log_probs_and_values(batch, timings)
                with timings.phase("adv"):
                    metrics |= add_advantages(batch, self.config, self.kl_controller)
            metrics |= advantage_metrics(batch) | staleness_metrics(batch, self.replicas.version)
            metrics |= self.learner.update(batch, self.step, timings)
        with timings.phase("guard"):
            metrics |= self.learner.measure_drift(batch)
        with timings.phase("update_weights"):
            parts = self.update_weights()
        timings.seconds |= {f"update_weights/{part}": s for part, s in parts.items()}
        calls = self.ranks.take_calls()
        if self.learner.has_separate_critic:
            timings.concurrent |= critic_seconds(calls)
        self.untraced = self.step, timings, samples.trajectories, calls
        return {**metrics, **self.performance(batch, timings), **self.faults()}

    @contextlib.contextmanager
    def recording(self, samples: Samples, batch: TokenBatch, timings: Timings) -> Iterator[None]:
        """Write the step's trajectories, with what the body finds of their tokens, if it ends or
        not: before the updates, so that a step whose record cannot be written is run again."""
        try:
            yield
        finally:
            if self.config.trainer.rollout_data_dir is not None:
                with timings.phase("rollout_data"):
                    self.collector.record(self.step, samples, token_signals(batch, self.config))

    def performance(self, batch: TokenBatch, timings: Timings) -> Metrics:
        """How fast the step was, and what it took of the devices."""
        ranks = (self.config.num_ranks, self.config.num_critic_ranks)
        seconds = timings.seconds | timings.concurrent
        speed = speed_metrics(self.learner.work.take(), seconds, ranks, self.peak_flops)
        own = throughput_metrics(batch, timings, self.config.num_gpus)
        busy = busy_metrics(timings, self.replicas.busy_share())
        return {**own, **speed, **busy, **self.ranks.take_transfer_metrics(), **timings.metrics()}

    def recover(self, verdict: Verdict, metrics: Metrics) -> None:
        """After a collapse: go on from the last healthy weights, with a lower learning rate.

        Steps, prompts and metrics go on, so that nothing is repeated; optimizer, schedule and
        controllers are those of the healthy checkpoint. What the collapsed weights sampled ahead is
        sampled again. Raises CollapseError where a run must end.
        """
        try:
            folder = self.guard.roll_back(self.step, verdict)
        except CollapseError:
            self.tracking.log(metrics, self.step)
            with contextlib.suppress(OSError):  # the collapse is what ends the run
                self.add_to_trace()
            raise
        self.collector.restart()
        self.replicas.sleep()
        self.load(folder)
        self.ranks.scale_lr(self.guard.lr_scale)
        self.update_weights()

    def update_weights(self) -> dict[str, float]:
        """Bring the policy's weights into the engines; returns the seconds of each part."""
        start = time.perf_counter()
        self.replicas.wake_up()
        awake = time.perf_counter()
        return {"wake_up": awake - start, **self.replicas.update_weights(self.ranks)}

    def validate(self) -> Metrics:
        """Score every validation row; dialogues go to `validation/step_N.jsonl`."""
        path = self.directory / folders.VALIDATION / f"step_{self.step}.jsonl"
        with self.stopper.interruptible():
            return validate(self.config, self.rollout, self.val_prompts, self.reward, path)

    def state(
        self, score: float | None = None, pending: Mapping[str, float] | None = None
    ) -> RunState:
        """Where the run stands now; see `RunState` for `score` and `pending`."""
        return RunState(
            step=self.step,
            version=self.replicas.version,
            sampler=self.collector.sampler.state_dict(),
            ahead=self.collector.state_dict(),
            kl_coef=self.kl_controller.value,
            reward=self.reward.state_dict(),
            guard=self.guard.state_dict(),
            best=self.best,
            score=score,
            pending=None if pending is None else dict(pending),
        )

    def save(self, wait: bool = False) -> None:
        """Write the checkpoint of the last finished step; it exists whole or not at all."""
        self.guard.add_pending(self.finished.step)
        self.finished = replace(self.finished, guard=self.guard.state_dict())
        self.save_plan.record_save()
        newest = self.finished.version or 0
        self.saver.save(self.finished, wait, self.collector.writer(self.finished.ahead, newest))

    def save_trusted(self) -> None:
        """Write a checkpoint that a rollback may go back to from now on."""
        self.finished = self.state(self.finished.score)
        self.save(wait=True)
        self.guard.mark_healthy(self.step)

    @contextlib.contextmanager
    def saving_what_is_finished(self) -> Iterator[None]:
        """Save the last finished step when the body is interrupted, or tool or plugin fail it."""
        try:
            yield
        except KeyboardInterrupt:
            if not self.stopper.reason or self.stopper.is_urgent:
                raise
            raise Interrupted(self.save_at_the_end(self.stopper.reason)) from None
        except (Interrupted, ToolOutage, ToolRefused, PluginError) as error:
            raise type(error)(self.save_at_the_end(str(error))) from error
        except ResourceError as error:  # no room for weights: every rank lives
            if self.step == self.finished.step:
                raise Interrupted(self.save_at_the_end(str(error))) from error
            self.saver.close()  # the ranks' weights are a step ahead of what is finished
            raise Interrupted(self.how_to_go_on(str(error))) from error
        except Exception as error:
            if isinstance(error, OSError) and is_file_error(error):
                reason = f"the run could not write what it has to: {error}"
                raise Interrupted(self.save_at_the_end(reason)) from error
            self.saver.close(None if isinstance(error, CollapseError) else LOST_RANK_TIMEOUT_S)
            if self.stopper.reason and isinstance(error, (RankLost, ReplicaLost)):
                # Slurm signals all processes of a job: their end is no loss to recover from.
                raise Interrupted(self.how_to_go_on(self.stopper.reason)) from error
            raise

    def save_at_the_end(self, reason: str) -> str:
        """Save what is finished unless it was; returns the reason and how to go on."""
        if self.finished.step == 0 or self.config.trainer.val_only:
            return f"{reason}; nothing was learned yet: start again with the same command"
        try:
            self.saver.finish_pending()
            if self.saver.last_step != self.finished.step or self.finished.pending is not None:
                self.save(wait=True)
        except (RankLost, SaveError) as error:
            self.saver.close(LOST_RANK_TIMEOUT_S)
            logger.error("the last finished step could not be saved: %s", error)
        return self.how_to_go_on(reason)

    def how_to_go_on(self, reason: str) -> str:
        """The reason of an end, the last checkpoint, and what goes on from it."""
        found = folders.latest(self.directory)
        if found is None:
            return f"{reason}; there is no checkpoint: start again with the same command"
        return f"{reason}; saved {found}: go on with the same command and trainer.resume_mode=auto"

    def resume(self) -> None:
        """Go on from the checkpoint that `trainer.resume_mode` names, if any."""
        folders.clean_up(self.directory)
        folder = folders.resume_folder(self.config.trainer.resume_mode, self.directory)
        if folder is not None:
            state = self.load(folder)
            self.step, self.best = state.step, state.best
            version = state.step + 1 if state.version is None else state.version
            self.replicas.version = version - 1
            finished = prefetched.read(folder)
            with checkpoint_errors(folder / folders.STATE_FILE):
                self.collector.sampler.load_state_dict(state.sampler)
                self.collector.load_state_dict(state.ahead, finished, version)
                if state.guard is not None:
                    self.guard.load_state_dict(state.guard)
            if state.guard is not None:
                self.ranks.scale_lr(self.guard.lr_scale)
            read_driver_random(folder)
            self.finished = state
            self.saver.record_resume(folder)
            logger.info("resumed from %s", folder)
        self.rewind(folder is not None)
        if not self.config.trainer.val_only:
            folders.set_aside(self.directory, after=self.step if folder else -1)

    def rewind(self, was_resumed: bool) -> None:
        """Remove from the trackers the steps that are run again; with val_only there are none."""
        if self.config.trainer.val_only:
            return
        comes_again = self.step == 0 or self.finished.pending is not None
        if was_resumed or self.config.trainer.resume_mode == "auto":
            self.tracking.rewind(self.step - comes_again)
        else:
            self.tracking.rewind(None)

    def load(self, folder: Path) -> RunState:
        """Load weights, optimizers, controller and reward; returns the driver's state."""
        self.saver.finish_pending()
        self.ranks.load_checkpoint(folder)
        state = RunState.read(folder)
        self.kl_controller.value = float(state.kl_coef)
        with checkpoint_errors(folder / folders.STATE_FILE):
            self.reward.load_state_dict(state.reward)
        return state

    def export(self) -> None:
        """Write the trained policy as Hugging Face folders: `model/`, its adapter as `adapter/`."""
        folder = self.directory / "model"
        self.ranks.save_policy(folder, self.replicas.dtype)
        if self.config.actor_rollout_ref.model.has_adapter:
            self.ranks.save_policy(self.directory / "adapter", is_adapter=True)
        copy_tokenizer(self.config.actor_rollout_ref.model.path, folder)
        template = self.config.template
        if is_file(template):
            shutil.copyfile(template, folder / TEMPLATE_FILE)
            template = TEMPLATE_FILE
        dialogue = {
            "template": template,
            "tools": list(self.config.agent.tools),
            "max_turns": self.config.max_turns,
            **self.environment.settings(),
        }
        (folder / "search_r1.json").write_text(json.dumps(dialogue) + "\n")
