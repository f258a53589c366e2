"""The training algorithm: one driver, `fit()` reads as the paper.

A step samples a group of trajectories per prompt, scores them, turns scores into advantages,
updates critic and policy, and brings the new weights into the engines. The trainer knows nothing
about search: agents run inside the rollout replicas, and the reward is a function it is given.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from verl import checkpoint
from verl.config import Config
from verl.core_algos.advantages import ADVANTAGES, AdvantageInputs
from verl.core_algos.jagged import outcome_to_tokens
from verl.core_algos.kl import KLController, apply_kl_in_reward, mean_sequence_kl
from verl.core_algos.losses import loss_weights
from verl.data import PromptSampler
from verl.protocol import DataProto, Prompt
from verl.reward import RewardFn
from verl.tracking import Tracking
from verl.trainer.collection import Collector, Samples
from verl.trainer.groups import RolloutReplicas, TrainerRanks
from verl.trainer.metrics import (
    Metrics,
    Timings,
    advantage_metrics,
    mean_by_key,
    throughput_metrics,
)
from verl.trainer.validation import validate
from verl.workers.weights import copy_tokenizer

logger = logging.getLogger(__name__)


def with_gradient(mini_batch: DataProto) -> DataProto:
    """The sequences that have a non-zero advantage; the token weights stay those of the whole."""
    has_any = [bool(a.any()) for a in mini_batch.sequences("advantages")]
    return mini_batch.select([i for i, has in enumerate(has_any) if has])


@dataclass
class RayPPOTrainer:
    """PPO and its kin over a group of training ranks and a group of rollout replicas."""

    config: Config
    ranks: TrainerRanks
    replicas: RolloutReplicas
    train_prompts: Sequence[Prompt]
    val_prompts: Sequence[Prompt]
    reward_fn: RewardFn
    kl_controller: KLController
    tracking: Tracking
    total_steps: int
    step: int = 0
    sampler: PromptSampler = field(init=False)

    def __post_init__(self) -> None:
        data = self.config.data
        self.sampler = PromptSampler(
            len(self.train_prompts),
            data.train_batch_size,
            shuffle=data.shuffle_train_dataloader,
            seed=self.config.trainer.seed,
        )
        self.directory = Path(self.config.trainer.default_local_dir)
        self.advantage = ADVANTAGES[self.config.algorithm.adv_estimator]
        self.collector = Collector(
            self.config, self.replicas, self.train_prompts, self.sampler, self.reward_fn,
            with_greedy=self.advantage.needs_greedy,
        )  # fmt: skip

    def fit(self) -> None:
        """Train to `total_steps` updates, validating and saving on the way."""
        trainer = self.config.trainer
        self.resume()
        self.update_weights()
        if trainer.val_only or (trainer.val_before_train and self.step == 0):
            self.tracking.log(self.validate(), self.step)
        if trainer.val_only:
            return
        with tqdm(total=self.total_steps, initial=self.step, desc="train", unit="step") as bar:
            while self.step < self.total_steps:
                self.step += 1
                metrics = self.train_step()
                if self.is_due(trainer.test_freq):
                    metrics |= self.validate()
                self.tracking.log(metrics, self.step)
                if self.is_due(trainer.save_freq):
                    self.save()
                bar.set_postfix(score=f"{metrics['critic/score/mean']:.3f}")
                bar.update()
        self.export()

    def is_due(self, frequency: int) -> bool:
        """Every `frequency` steps, and at the end unless it is 0."""
        if self.step == self.total_steps:
            return frequency != 0
        return frequency > 0 and self.step % frequency == 0

    def train_step(self) -> Metrics:
        """One step: sample, score, judge, learn, hand over the weights."""
        timings = Timings()
        samples, metrics = self.collector.collect(self.step, timings)
        batch = self.assemble(samples)
        with timings.phase("old_log_prob"):
            self.add_log_probs(batch)
        with timings.phase("values"):
            self.add_values(batch)
        with timings.phase("adv"):
            metrics |= self.add_advantages(batch)
        metrics |= advantage_metrics(batch)
        with timings.phase("update_critic"):
            metrics |= self.update_critic(batch)
        with timings.phase("update_actor"):
            metrics |= self.update_actor(batch)
        with timings.phase("update_weights"):
            self.update_weights()
        return {**metrics, **throughput_metrics(batch, timings), **timings.metrics()}

    def assemble(self, samples: Samples) -> DataProto:
        """The jagged batch with scores; `loss_mask` says which tokens are learned from."""
        batch = DataProto.from_trajectories(samples.trajectories)
        masking = self.config.actor_rollout_ref.actor.state_masking
        batch.tokens["loss_mask"] = batch.tokens["policy_mask" if masking else "response_mask"]
        scores = [r.score for r in samples.rewards]
        batch.rows["scores"] = torch.tensor(scores, dtype=torch.float32)
        if self.advantage.needs_greedy:
            greedy = torch.tensor(samples.greedy_scores, dtype=torch.float32)
            batch.rows["greedy_scores"] = greedy
        return batch

    def add_log_probs(self, batch: DataProto) -> None:
        """Old and reference log-probs, where an algorithm needs them.

        With a single update per step the old policy is the updating one, and the pass is spared:
        the ratio is exp(log_prob - log_prob.detach()).
        """
        if self.config.updates_per_step > 1 or self.config.kl_in_reward:
            batch.tokens["old_log_probs"] = self.ranks.log_probs(batch)
        if self.config.needs_reference:
            batch.tokens["ref_log_probs"] = self.ranks.ref_log_probs(batch)

    def add_values(self, batch: DataProto) -> None:
        """The critic's view of the states, for estimators that ask for it."""
        if self.advantage.needs_critic:
            batch.tokens["values"] = self.ranks.values(batch)

    def add_advantages(self, batch: DataProto) -> Metrics:
        """From scores (less KL, if it is in the reward) to advantages and returns."""
        algorithm, mask = self.config.algorithm, batch.tokens["loss_mask"]
        rewards = outcome_to_tokens(batch.rows["scores"], mask, batch.offsets)
        metrics: Metrics = {}
        if self.config.kl_in_reward:
            pair = (batch.tokens["old_log_probs"], batch.tokens["ref_log_probs"])
            kl = float(mean_sequence_kl(*pair, mask, batch.offsets, algorithm.kl_penalty))
            rewards = apply_kl_in_reward(
                rewards, *pair, mask, self.kl_controller.value, algorithm.kl_penalty
            )
            metrics = {"critic/kl": kl, "critic/kl_coef": self.kl_controller.value}
            self.kl_controller.update(kl, len(batch))
        estimate = self.advantage.compute(
            AdvantageInputs(
                token_rewards=rewards,
                policy_mask=mask,
                offsets=batch.offsets,
                values=batch.tokens.get("values"),
                group_ids=batch.columns["group"],
                gamma=algorithm.gamma,
                lam=algorithm.lam,
                norm_by_std=algorithm.norm_adv_by_std_in_grpo,
                greedy_scores=batch.rows.get("greedy_scores"),
            )
        )
        batch.tokens |= {"advantages": estimate.advantages, "returns": estimate.returns}
        return metrics

    def mini_batches(self, batch: DataProto, size: int, epochs: int) -> list[DataProto]:
        """Shuffled mini-batches of `size` sequences, with the weight of each token in its loss."""
        mode = self.config.actor_rollout_ref.actor.loss_agg_mode
        rng = np.random.default_rng((self.config.trainer.seed, self.step))
        chosen = []
        for _ in range(epochs):
            order = rng.permutation(len(batch)).tolist()
            for start in range(0, len(order), size):
                mini = batch.select(order[start : start + size])
                mini.tokens["loss_weights"] = loss_weights(
                    mini.tokens["loss_mask"], mini.offsets, mode,
                    float(self.config.data.max_response_length),
                )  # fmt: skip
                chosen.append(mini)
        return chosen

    def update_critic(self, batch: DataProto) -> Metrics:
        """The value function's epochs over the batch."""
        if not self.advantage.needs_critic:
            return {}
        critic = self.config.critic
        size = critic.ppo_mini_batch_size or self.config.actor_rollout_ref.actor.ppo_mini_batch_size
        minis = self.mini_batches(batch, size, critic.ppo_epochs)
        return mean_by_key([self.ranks.update_critic(mini) for mini in minis])

    def update_actor(self, batch: DataProto) -> Metrics:
        """The policy's epochs over the batch; none while the critic warms up."""
        if self.step <= self.config.trainer.critic_warmup and self.advantage.needs_critic:
            return {}
        actor = self.config.actor_rollout_ref.actor
        minis = self.mini_batches(batch, actor.ppo_mini_batch_size, actor.ppo_epochs)
        if not self.config.needs_every_trajectory:
            minis = [with_gradient(mini) for mini in minis]
        return mean_by_key([self.ranks.update_actor(mini) for mini in minis])

    def update_weights(self) -> None:
        """Bring the policy's weights into the engines."""
        self.replicas.wake_up()
        self.replicas.update_weights(self.ranks)

    def validate(self) -> Metrics:
        """Score every validation row; dialogues go to `validation/step_N.jsonl`."""
        path = self.directory / "validation" / f"step_{self.step}.jsonl"
        return validate(self.config, self.replicas, self.val_prompts, self.reward_fn, path)

    def save(self) -> None:
        """Write the checkpoint of this step; it exists whole or not at all."""
        state = {
            "step": self.step,
            "sampler": self.sampler.state_dict(),
            "kl_coef": self.kl_controller.value,
        }
        with checkpoint.writing(self.directory, self.step) as folder:
            self.ranks.save_checkpoint(folder)
            checkpoint.write_state(folder, state)

    def resume(self) -> None:
        """Go on from the checkpoint that `trainer.resume_mode` names, if any."""
        folder = checkpoint.resolve(self.config.trainer.resume_mode, self.directory)
        if folder is None:
            return
        self.ranks.load_checkpoint(folder)
        state = checkpoint.read_state(folder)
        self.step = int(state["step"])
        self.sampler.load_state_dict(state["sampler"])
        self.kl_controller.value = float(state["kl_coef"])
        logger.info("resumed from %s", folder)

    def export(self) -> None:
        """Write the trained policy as a Hugging Face folder, `model/`."""
        folder = self.directory / "model"
        self.ranks.save_weights(folder, self.replicas.dtype)
        copy_tokenizer(self.config.actor_rollout_ref.model.path, folder)
        dialogue = {
            "template": self.config.template,
            "max_turns": self.config.max_turns,
            "topk": self.config.retriever.topk,
        }
        (folder / "search_r1.json").write_text(json.dumps(dialogue) + "\n")
