"""What terms that distil the policy on its own trajectories share: `sibling` and `teacher`.

Such a term subtracts the log-ratio to a teacher, who scores the tokens that were sampled, from
their advantages: after the estimator's and before the updates.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from verl.batch import ROW_STARTS, TokenBatch
from verl.config.terms import KEY
from verl.core_algos.policy_losses import LOG_RATIO_LIMIT
from verl.errors import ConfigError, explain
from verl.packing import share_prompts
from verl.trainer.collect import Samples
from verl.trainer.hooks import Hook
from verl.types import Metrics

if TYPE_CHECKING:
    from verl.trainer.loop import RayPPOTrainer


class DistillationTerm(Hook):
    """Adds a term to the advantages of a step."""

    name: ClassVar[str]
    """Its name in `actor.terms`."""

    def __init__(self, coef: float) -> None:
        self._coef = coef
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

    @abstractmethod
    def teach(self, trainer: RayPPOTrainer) -> None:
        """Add the term. Raises ConfigError for trajectories that cannot have it."""

    def note_share(self, chosen: Sequence[int], batch: TokenBatch) -> None:
        """Note which trajectories have a teacher."""
        self._metrics = {f"rollout/{self.name}_share": len(chosen) / max(1, len(batch))}

    def subtract(
        self, batch: TokenBatch, chosen: Sequence[int], own: Tensor, theirs: Tensor, mask: Tensor
    ) -> None:
        """Subtract the log-ratio from the advantages of the `chosen` trajectories.

        `own`, `theirs` and `mask` (the tokens to learn from) are over these trajectories' tokens.
        """
        term = log_ratio(own, theirs, mask)
        batch.tokens["advantages"][batch.positions(chosen)] -= self._coef * term
        self._metrics[f"rollout/{self.name}_kl"] = float(term[mask].mean())

    def check_rows(self, batch: TokenBatch) -> None:
        """Raise ConfigError for episodes of several rows, which a teacher would read as one."""
        if ROW_STARTS in batch.tokens:
            got, fix = "an episode of several rows", "leave the term out, or agent.name=dialogue"
            raise ConfigError(explain(f"{KEY}.{self.name}", got, "episodes of one row", fix))

    def check_outcomes(self, samples: Samples) -> None:
        """Raise ConfigError if the reward does not say which answers are right."""
        if samples.rewards and all(reward.is_right is None for reward in samples.rewards):
            got, expected = "a reward without outcomes", "one that says which answers are right"
            fix = (
                "use another, such as em, return RewardOutput with is_right, or leave the term out"
            )
            raise ConfigError(explain(f"{KEY}.{self.name}", got, expected, fix))


def begin_own(trainer: RayPPOTrainer, students: TokenBatch) -> Callable[[], Tensor]:
    """Start the policy's log-probs before the updates; returns a function that waits for them."""
    own = students.tokens.get("old_log_probs")
    if own is None or trainer.config.old_log_probs == "engine":
        return begin_scores(trainer, plain(students))
    return lambda: own


def begin_scores(trainer: RayPPOTrainer, batch: TokenBatch) -> Callable[[], Tensor]:
    """Start the policy's log-probs; what dialogues of a group begin with alike is computed once."""
    if trainer.config.trainer.share_prompts:
        share_prompts(batch)
    return trainer.ranks.begin_forward("actor", batch)


def plain(batch: TokenBatch) -> TokenBatch:
    """Return the columns that a forward pass reads, and the groups."""
    names = ("input_ids", "policy_mask", "loss_mask")
    tokens = {name: batch.tokens[name] for name in names}
    return TokenBatch(batch.offsets, tokens, columns={"group": batch.columns["group"]})


def targets(batch: TokenBatch) -> Tensor:
    """Return which tokens the policy sampled and learns from: (num_tokens,) bool."""
    return batch.tokens["loss_mask"] & batch.tokens["policy_mask"]


def log_ratio(own: Tensor, theirs: Tensor, mask: Tensor) -> Tensor:
    """Return log π - log π_teacher of the sampled tokens, within ±20; 0 elsewhere: (num_tokens,).

    As a cost of sampled tokens, its policy gradient is that of KL(π ‖ π_teacher) in expectation.
    """
    ratio = (own - theirs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return ratio.where(mask, 0.0)
