"""The training algorithm, run by one driver process.

Each step samples a group of trajectories per prompt, scores them, estimates advantages, updates
critic and policy, and transfers the new weights to the rollout engines. Agents and their tools run
inside the rollout replicas; the reward is passed in.
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
    MismatchError,
    PluginError,
    RankLost,
    ReplicaLost,
    ResourceError,
    SaveError,
    ToolOutage,
    ToolRefused,
)
from verl.files import is_file_error
from verl.monitor.guard import CollapseGuard
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
from verl.trainer.metric_names import check_measured
from verl.trainer.metrics import (
    advantage_metrics,
    busy_metrics,
    staleness_metrics,
    throughput_metrics,
)
from verl.trainer.ranks import TrainerRanks
from verl.trainer.recorded import build_collector
from verl.trainer.stopping import Stopper, run_deadline
from verl.trainer.validation import validate
from verl.training.checkpoint_files import checkpoint_errors
from verl.training.weights import copy_tokenizer
from verl.types import Metrics, Prompt, TokenBatch

logger = logging.getLogger(__name__)

Replicas = RolloutReplicas | NullRolloutPool
Transfer = Callable[[TrainerRanks, Replicas, int], dict[str, float]]
"""Transfers the weights of a step from ranks to engines; returns the seconds of each part."""


def transfer_weights(ranks: TrainerRanks, replicas: Replicas, step: int) -> dict[str, float]:
    """Wake the engines up, and have them load the weights that the ranks have after `step`."""
    start = time.perf_counter()
    replicas.wake_up()
    awake = time.perf_counter()
    return {"wake_up": awake - start, **replicas.update_weights(ranks)}


@dataclass
class RayPPOTrainer:
    """Trains a policy with PPO, GRPO or a related algorithm on training ranks and replicas."""

    config: Config
    ranks: TrainerRanks
    replicas: Replicas
    train_prompts: Sequence[Prompt]
    val_prompts: Sequence[Prompt]
    reward_fn: RewardFn | RewardManager
    kl_controller: KLController
    tracking: Tracking
    total_steps: int
    environment: Environment = field(default_factory=Environment)
    """The agents' tools: waited for during an outage, and described in the exported model."""
    faults: Callable[[], Metrics] = dict
    """Returns the counts of lost processes so far, for each step's metrics."""
    transfer: Transfer = transfer_weights
    """Transfers the weights after a step to the engines."""
    identity: Mapping[str, Any] = field(default_factory=dict)
    """Configuration and fingerprints to store in each checkpoint (`checkpoint.resume`)."""
    step: int = 0
    """The current step, or the last finished one between steps."""
    best: Mapping[str, Any] | None = None
    """`metric`, `value` and `step` of the best validation so far."""
    finished_state: RunState = field(init=False)
    """State after the last finished step, which the next checkpoint stores."""

    def __post_init__(self) -> None:
        trainer = self.config.trainer
        self.directory = Path(trainer.default_local_dir)
        self.saver = Saver(
            trainer, self.directory, self.ranks, self.identity,
            protected=lambda: self.guard.protected_steps,
            on_lost=lambda step: self.guard.drop_pending(step),
        )  # fmt: skip
        self.save_plan = SavePlan(trainer, self.total_steps)
        self.stopper = Stopper(run_deadline(trainer.time_limit), self.saver.expected_s)
        guard = trainer.guard
        if not self.config.samples_rollouts:  # the policy moves away from recorded trajectories
            guard = replace(guard, mismatch_bound=None)
        self.guard = CollapseGuard(guard, self.directory, self.saver.finish_pending)
        self.learner = Learner(self.config, self.ranks)
        self.peak_flops = self.ranks.peak_flops()
        self.trace = Trace(self.directory if trainer.trace else None)
        self.pending_trace: tuple[Any, ...] | None = None
        """Arguments of `Trace.add_step` for the last step, until they are written."""
        self.reward = adapted(self.reward_fn)
        self.rollout = RetryingRollout(
            self.replicas, self.environment, self.stopper.check,
            expected_identity=self.identity.get("fingerprints", {}),
        )  # fmt: skip
        self.collector = build_collector(
            self.config, self.rollout, self.train_prompts, self.reward,
            last_step=self.total_steps,
        )  # fmt: skip
        self.finished_state = self.current_state()

    def fit(self) -> None:
        """Train to `total_steps` updates, with validation and checkpoints on the way.

        Raises Interrupted, ToolOutage, ToolRefused or PluginError after saving the last finished
        step; CollapseError, RankLost, ReplicaLost and SaveError without saving it.
        """
        trainer = self.config.trainer
        with steady_memory(), self.stopper.handling_signals(), self.saving_on_interruption():
            self.resume()
            self.sync_weights()
            if trainer.val_only or (trainer.val_before_train and self.step == 0):
                self.tracking.log(self.validate(), self.step)
            if trainer.val_only:
                return
            self.train()
            self.export()
            self.saver.finish_pending(is_final=True)

    def train(self) -> None:
        """Run the remaining steps."""
        if self.finished_state.pending is not None:
            # The resumed checkpoint was saved after this step's updates, before its validation.
            self.finish_step(dict(self.finished_state.pending))
        with tqdm(total=self.total_steps, initial=self.step, desc="train", unit="step") as bar:
            while self.step < self.total_steps:
                self.stopper.check()
                self.saver.poll()
                with self.stopper.timing_step():
                    self.step += 1
                    metrics = self.train_step()
                    self.judge(metrics)
                    self.finish_step(metrics)
                score = f"{metrics['critic/score/mean']:.3f}"
                bar.set_postfix({"score": score, **self.gpu_hours(bar)})
                bar.update()
                gc.collect()  # the only collection of a step, see `steady_memory`

    def train_step(self) -> Metrics:
        """Run one step: sample, score, estimate advantages, update, sync the weights."""
        timings = Timings(self.ranks.take_peak_memory)
        with self.stopper.interruptible():
            samples, metrics = self.collector.collect(self.step, timings)
        with one_thread():
            batch = assemble(samples, self.config)
            with self.recording_rollouts(samples, batch, timings):
                self.learner.compute_log_probs_and_values(batch, timings)
                with timings.phase("adv"):
                    metrics |= add_advantages(batch, self.config, self.kl_controller)
            metrics |= advantage_metrics(batch) | staleness_metrics(batch, self.replicas.version)
            metrics |= self.learner.update(batch, self.step, timings)
        with timings.phase("guard"):
            metrics |= self.learner.measure_drift(batch)
        with timings.phase("update_weights"):
            seconds = self.sync_weights()
        timings.seconds |= {f"update_weights/{part}": s for part, s in seconds.items()}
        calls = self.ranks.take_calls()
        if self.learner.has_separate_critic:
            timings.concurrent |= critic_seconds(calls)
        self.pending_trace = self.step, timings, samples.trajectories, calls
        return metrics | self.performance_metrics(batch, timings) | self.faults()

    @contextlib.contextmanager
    def recording_rollouts(
        self, samples: Samples, batch: TokenBatch, timings: Timings
    ) -> Iterator[None]:
        """Write the step's trajectories with the token columns that the body adds to the batch.

        They are also written if the body fails, and always before the updates: a step whose
        rollouts cannot be written is run again from the weights that it started with.
        """
        try:
            yield
        finally:
            if self.config.trainer.rollout_data_dir is not None:
                with timings.phase("rollout_data"):
                    self.collector.record(self.step, samples, token_signals(batch, self.config))

    def sync_weights(self) -> dict[str, float]:
        """Transfer the policy's weights to the engines; returns the seconds of each part."""
        return self.transfer(self.ranks, self.replicas, self.step)

    def judge(self, metrics: Metrics) -> None:
        """Add the guard's verdict to `metrics`; raises CollapseError or MismatchError."""
        verdict = self.guard.judge(self.step, metrics)
        try:
            self.guard.require_health(self.step, verdict)
        except (CollapseError, MismatchError):
            self.tracking.log(metrics, self.step)
            with contextlib.suppress(OSError):  # the error to raise is the verdict
                self.write_trace()
            raise

    def finish_step(self, metrics: Metrics) -> None:
        """Finish a step whose weights are final: validate, log, save."""
        self.finished_state = self.current_state(pending=metrics)
        self.write_trace()  # only now, so that a full disk cannot lose the step
        score = None
        if is_due(self.config.trainer.test_freq, self.step, self.total_steps):
            metrics |= self.validate()
            score = self.update_best(metrics)
        metrics |= self.reward.observe(self.step, metrics)
        self.tracking.log(metrics, self.step)
        self.finished_state = self.current_state(score=score)
        if self.save_plan.is_due(self.step):
            self.save()

    def validate(self) -> Metrics:
        """Score every validation row; dialogues go to `validation/step_N.jsonl`.

        Raises PluginError if the first validation of a run has no `trainer.best_metric`.
        """
        path = self.directory / folders.VALIDATION / f"step_{self.step}.jsonl"
        with self.stopper.interruptible():
            metrics = validate(self.config, self.rollout, self.val_prompts, self.reward, path)
        if self.best is None and not self.config.trainer.val_only:
            check_measured(self.config.trainer.best_metric, metrics)
        return metrics

    def update_best(self, metrics: Metrics) -> float | None:
        """Return `trainer.best_metric` at this step, and remember it if it is the best so far."""
        name = self.config.trainer.best_metric
        score = metrics.get(name)
        if score is None:
            measured = ", ".join(sorted(key for key in metrics if key.startswith("val/")))
            logger.warning("trainer.best_metric: no %s was measured, only %s", name, measured)
        elif self.best is None or score > self.best["value"]:
            self.best = {"metric": name, "value": score, "step": self.step}
        return score

    def performance_metrics(self, batch: TokenBatch, timings: Timings) -> Metrics:
        """Return the step's throughput, utilization, device memory and seconds by phase."""
        num_ranks = (self.config.placement.num_ranks, self.config.placement.num_critic_ranks)
        seconds = timings.seconds | timings.concurrent
        flops = self.learner.work.take()
        return {
            **throughput_metrics(batch, timings, self.config.placement.num_gpus),
            **speed_metrics(flops, seconds, num_ranks, self.peak_flops),
            **busy_metrics(timings, self.replicas.busy_share()),
            **self.ranks.take_transfer_metrics(),
            **timings.metrics(),
        }

    def write_trace(self) -> None:
        """Write the last step's events to the trace, once."""
        if self.pending_trace is not None:
            self.trace.add_step(*self.pending_trace)
            self.pending_trace = None

    def gpu_hours(self, bar: tqdm[NoReturn]) -> dict[str, str]:
        """Return GPU-hours used and their expected total, for the progress bar; empty on CPU."""
        if not uses_gpus(self.config):
            return {}
        hours = self.config.placement.num_gpus * bar.format_dict["elapsed"] / 3600
        share = (self.step - bar.initial) / (self.total_steps - bar.initial)
        return {"gpu_h": f"{hours:.2f}/{hours / share:.2f}"}

    def current_state(
        self, score: float | None = None, pending: Mapping[str, float] | None = None
    ) -> RunState:
        """Return the current state of the run; see `RunState` for `score` and `pending`."""
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
        """Write an atomic checkpoint of the last finished step."""
        self.guard.add_pending(self.finished_state.step)
        self.finished_state = replace(self.finished_state, guard=self.guard.state_dict())
        self.save_plan.record_save()
        state = self.finished_state
        write_prefetched = self.collector.prefetched_writer(state.ahead, state.version or 0)
        self.saver.save(state, wait, write_prefetched)

    @contextlib.contextmanager
    def saving_on_interruption(self) -> Iterator[None]:
        """Save the last finished step if the body is interrupted, or tools, user code or disk fail.

        The error that is raised says how to continue.
        """
        try:
            yield
        except KeyboardInterrupt:
            if not self.stopper.reason or self.stopper.is_urgent:
                raise
            raise Interrupted(self.save_before_exit(self.stopper.reason)) from None
        except (Interrupted, ToolOutage, ToolRefused, PluginError) as error:
            raise type(error)(self.save_before_exit(str(error))) from error
        except MismatchError as error:  # saving would need the engines, or keep a wrong policy
            self.saver.close()
            raise MismatchError(self.with_resume_hint(str(error))) from error
        except ResourceError as error:  # no space for transferred weights: all ranks are alive
            if self.step == self.finished_state.step:
                raise Interrupted(self.save_before_exit(str(error))) from error
            # The ranks' weights are already one step ahead of the finished state.
            self.saver.close()
            raise Interrupted(self.with_resume_hint(str(error))) from error
        except Exception as error:  # whatever ended the run: no save may go on behind it
            if isinstance(error, OSError) and is_file_error(error):
                reason = f"the run could not write its files: {error}"
                raise Interrupted(self.save_before_exit(reason)) from error
            self.saver.close(None if isinstance(error, CollapseError) else LOST_RANK_TIMEOUT_S)
            if self.stopper.reason and isinstance(error, (RankLost, ReplicaLost)):
                # Slurm signals all processes of a job, so lost processes are part of the stop.
                raise Interrupted(self.with_resume_hint(self.stopper.reason)) from error
            raise

    def save_before_exit(self, reason: str) -> str:
        """Save the last finished step if needed; returns the reason and how to continue."""
        if self.finished_state.step == 0 or self.config.trainer.val_only:
            return f"{reason}; nothing was learned yet: start again with the same command"
        try:
            self.saver.finish_pending()
            is_saved = self.saver.last_step == self.finished_state.step
            if not is_saved or self.finished_state.pending is not None:
                self.save(wait=True)
        except (RankLost, SaveError) as error:
            self.saver.close(LOST_RANK_TIMEOUT_S)
            logger.error("the last finished step could not be saved: %s", error)
        return self.with_resume_hint(reason)

    def with_resume_hint(self, reason: str) -> str:
        """Return the reason for stopping, with the last checkpoint and how to continue from it."""
        last = folders.latest(self.directory)
        if last is None:
            return f"{reason}; there is no checkpoint: start again with the same command"
        hint = "continue with the same command and trainer.resume_mode=auto"
        return f"{reason}; saved {last}: {hint}"

    def resume(self) -> None:
        """Resume from the checkpoint that `trainer.resume_mode` refers to, if any."""
        folders.clean_up(self.directory)
        folder = folders.resume_folder(self.config.trainer.resume_mode, self.directory)
        if folder is not None:
            state = self.load_checkpoint(folder)
            self.step, self.best = state.step, state.best
            version = state.step + 1 if state.version is None else state.version
            self.replicas.version = version - 1  # `fit` transfers the weights as the next version
            finished = prefetched.read(folder)
            with checkpoint_errors(folder / folders.STATE_FILE):
                self.collector.sampler.load_state_dict(state.sampler)
                self.collector.load_state_dict(state.ahead, finished, version)
                if state.guard is not None:
                    self.guard.load_state_dict(state.guard)
            read_driver_random(folder)
            self.finished_state = state
            self.saver.record_resume(folder)
            logger.info("resumed from %s", folder)
        if not self.config.trainer.val_only:
            self.rewind_trackers(was_resumed=folder is not None)
            folders.set_aside(self.directory, after=-1 if folder is None else self.step)

    def rewind_trackers(self, was_resumed: bool) -> None:
        """Remove the steps that will be logged again from the trackers."""
        logs_step_again = self.step == 0 or self.finished_state.pending is not None
        last_step = self.step - 1 if logs_step_again else self.step
        starts_over = not was_resumed and self.config.trainer.resume_mode != "auto"
        self.tracking.rewind(None if starts_over else last_step)

    def load_checkpoint(self, folder: Path) -> RunState:
        """Load weights, optimizers, KL controller and reward; returns the driver's state."""
        self.saver.finish_pending()
        self.ranks.load_checkpoint(folder)
        state = RunState.read(folder)
        self.kl_controller.value = float(state.kl_coef)
        with checkpoint_errors(folder / folders.STATE_FILE):
            self.reward.load_state_dict(state.reward)
        return state

    def export(self) -> None:
        """Write the trained policy as a Hugging Face folder `model/`, its adapter to `adapter/`."""
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
            "chat_template_kwargs": dict(self.config.data.chat_template_kwargs),
            **self.environment.settings(),
        }
        (folder / "search_r1.json").write_text(json.dumps(dialogue) + "\n")
