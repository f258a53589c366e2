"""`actor.terms.sibling`: distils a policy from itself, reading a right answer to the same question.

The teacher is the policy of the step with a right dialogue of the trajectory's group before its
own. It scores the tokens that were sampled without that; nothing further is sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import AutoConfig

from verl.batch import ROW_STARTS, TokenBatch
from verl.config.terms import KEY
from verl.core_algos.policy_losses import LOG_RATIO_LIMIT
from verl.errors import ConfigError, explain
from verl.model_files import num_positions
from verl.remote_code import trusts_remote_code
from verl.trainer.collect import Samples
from verl.trainer.hooks import Hook
from verl.types import Metrics

if TYPE_CHECKING:
    from verl.trainer.build import Parts
    from verl.trainer.loop import RayPPOTrainer


class SiblingTeacher(Hook):
    """Adds the term to the advantages of a step, after the estimator's and before the updates."""

    def __init__(self, coef: float, context: int | None) -> None:
        """`context` is the model's context length in tokens; None if it states none."""
        self._coef, self._context = coef, context
        self._metrics: Metrics = {}

    @contextmanager
    def during(self, phase: str, trainer: RayPPOTrainer) -> Iterator[None]:
        """Add the term when the token columns have been computed."""
        yield
        if phase == "prepare":
            with trainer.current.timings.phase("teacher"):
                self.teach(trainer)

    def on_trained(self, trainer: RayPPOTrainer, metrics: Metrics) -> None:
        """Add the share of trajectories with a teacher, and the KL to it."""
        metrics |= self._metrics

    def teach(self, trainer: RayPPOTrainer) -> None:
        """Subtract the log-ratio to the teacher. Raises ConfigError if no outcome is known."""
        batch, samples = trainer.current.batch, trainer.current.samples
        assert batch is not None, "a prepared step has a batch"
        check_rows(batch, "sibling")
        check_outcomes(samples, "sibling")
        pairs = teachers(samples, batch.lengths.tolist(), self._context)
        self._metrics = {"rollout/sibling_share": len(pairs) / max(1, len(batch))}
        if not pairs:
            return
        ranks, students = trainer.ranks, batch.select([student for student, _ in pairs])
        own = begin_own(trainer, students)()
        guided = with_contexts(batch, pairs)
        mask = students.tokens["loss_mask"] & students.tokens["policy_mask"]
        theirs = torch.zeros_like(own)
        theirs[mask] = ranks.begin_forward("actor", guided)()[guided.tokens["loss_mask"]]
        term = log_ratio(own, theirs, mask)
        positions = batch.positions([student for student, _ in pairs])
        batch.tokens["advantages"][positions] -= self._coef * term
        self._metrics["rollout/sibling_kl"] = float(term[mask].mean())


def begin_own(trainer: RayPPOTrainer, students: TokenBatch) -> Callable[[], Tensor]:
    """Start the policy's log-probs before the updates; returns a function that waits for them."""
    own = students.tokens.get("old_log_probs")
    if own is None or trainer.config.old_log_probs == "engine":
        return trainer.ranks.begin_forward("actor", plain(students))
    return lambda: own


def check_rows(batch: TokenBatch, term: str) -> None:
    """Raise ConfigError for episodes of several rows, which a teacher would read as one."""
    if ROW_STARTS in batch.tokens:
        got, fix = "an episode of several rows", "leave the term out, or agent.name=dialogue"
        raise ConfigError(explain(f"{KEY}.{term}", got, "episodes of one row", fix))


def check_outcomes(samples: Samples, term: str) -> None:
    """Raise ConfigError if the reward does not say which answers are right."""
    if samples.rewards and all(reward.is_right is None for reward in samples.rewards):
        got, expected = "a reward without outcomes", "one that says which answers are right"
        fix = "use another, such as em, return RewardOutput with is_right, or leave the term out"
        raise ConfigError(explain(f"{KEY}.{term}", got, expected, fix))


def teachers(
    samples: Samples, lengths: Sequence[int], context: int | None = None
) -> list[tuple[int, int]]:
    """Return pairs of a trajectory and the right sibling that its teacher reads.

    This is the shortest other right one of the group, the first of equal ones. Trajectories without
    one, or whose two dialogues exceed the context, have no teacher.
    """
    right: dict[str, list[int]] = {}
    for i, reward in enumerate(samples.rewards):
        if reward.is_right:
            right.setdefault(samples.trajectories[i].group, []).append(i)
    pairs = []
    for student, trajectory in enumerate(samples.trajectories):
        others = [i for i in right.get(trajectory.group, []) if i != student]
        if not others:
            continue
        sibling = min(others, key=lambda i: lengths[i])
        if context is None or lengths[student] + lengths[sibling] <= context:
            pairs.append((student, sibling))
    return pairs


def plain(batch: TokenBatch) -> TokenBatch:
    """Return the columns that a forward pass reads, of dialogues that share nothing."""
    names = ("input_ids", "policy_mask", "loss_mask")
    return TokenBatch(batch.offsets, {name: batch.tokens[name] for name in names})


def with_contexts(batch: TokenBatch, pairs: Sequence[tuple[int, int]]) -> TokenBatch:
    """Return each pair's trajectory behind its sibling, whose tokens are no targets."""
    both = plain(batch).select([i for student, sibling in pairs for i in (sibling, student)])
    target = both.tokens["loss_mask"] & both.tokens["policy_mask"]
    for context in both.spans(range(0, len(both), 2)):
        target[context] = False
    columns = {"input_ids": both.tokens["input_ids"], "policy_mask": target, "loss_mask": target}
    return TokenBatch(both.offsets[::2], columns)


def log_ratio(own: Tensor, theirs: Tensor, mask: Tensor) -> Tensor:
    """Return log π - log π_teacher of the sampled tokens, within ±20; 0 elsewhere: (num_tokens,).

    As a cost of sampled tokens, its policy gradient is that of KL(π ‖ π_teacher) in expectation.
    """
    ratio = (own - theirs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.where(mask, ratio, 0.0)


def hook(parts: Parts) -> SiblingTeacher | None:
    """Return the hook of a run with the term."""
    section = parts.config.actor_rollout_ref
    coef = section.actor.terms.get("sibling", 0.0)
    if not coef:
        return None
    code = trusts_remote_code()
    model = AutoConfig.from_pretrained(section.model.path, trust_remote_code=code)
    return SiblingTeacher(coef, num_positions(model))
