"""`actor.terms.sibling`: distils a policy from itself, reading a right answer to the same question.

The teacher is the policy of the step with a right dialogue of the trajectory's group before its
own. It scores the tokens that were sampled without that; nothing further is sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from transformers import AutoConfig

from verl.batch import TokenBatch
from verl.ext.distillation import DistillationTerm, begin_own, begin_scores, plain, targets
from verl.model_files import num_positions
from verl.remote_code import trusts_remote_code
from verl.trainer.collect import Samples

if TYPE_CHECKING:
    from verl.trainer.build import Parts
    from verl.trainer.loop import RayPPOTrainer


class SiblingTeacher(DistillationTerm):
    """Has the policy of the step, with a right dialogue of the group before its own, as teacher."""

    name = "sibling"

    def __init__(self, coef: float, context: int | None) -> None:
        """`context` is the model's context length in tokens; None if it states none."""
        super().__init__(coef)
        self._context = context

    def teach(self, trainer: RayPPOTrainer) -> None:
        """Subtract the log-ratio to the teacher. Raises ConfigError if no outcome is known."""
        batch, samples = trainer.current.batch, trainer.current.samples
        assert batch is not None, "a prepared step has a batch"
        self.check_rows(batch)
        self.check_outcomes(samples)
        pairs = teachers(samples, batch.lengths.tolist(), self._context)
        chosen = [student for student, _ in pairs]
        self.note_share(chosen, batch)
        if not pairs:
            return
        students, guided = batch.select(chosen), with_contexts(batch, pairs)
        own, mask = begin_own(trainer, students)(), targets(students)
        theirs = torch.zeros_like(own)
        scores = begin_scores(trainer, guided)()
        theirs[mask] = scores[guided.tokens["loss_mask"]]
        self.subtract(batch, chosen, own, theirs, mask)


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


def with_contexts(batch: TokenBatch, pairs: Sequence[tuple[int, int]]) -> TokenBatch:
    """Return each pair's trajectory behind its sibling, whose tokens are no targets."""
    both = plain(batch).select([i for student, sibling in pairs for i in (sibling, student)])
    target = targets(both)
    for context in both.spans(range(0, len(both), 2)):
        target[context] = False
    columns = {"input_ids": both.tokens["input_ids"], "policy_mask": target, "loss_mask": target}
    return TokenBatch(both.offsets[::2], columns, columns={"group": both.columns["group"][::2]})


def hook(parts: Parts) -> SiblingTeacher | None:
    """Return the hook of a run with the term."""
    section = parts.config.actor_rollout_ref
    coef = section.actor.terms.get("sibling", 0.0)
    if not coef:
        return None
    code = trusts_remote_code()
    model = AutoConfig.from_pretrained(section.model.path, trust_remote_code=code)
    return SiblingTeacher(coef, num_positions(model))
