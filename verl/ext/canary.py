"""The canary of weights: shows after each transfer that every engine has the trained weights.

Ranks and engines compute the log-probs of one fixed sequence. With the same weights they differ by
rounding only, as much as at the start of the run. An engine that lacks an adapter, a tensor or the
whole of the newest weights differs by more, or has the same scores as before.

`WeightCanary` transfers weights in place of the trainer's own `transfer`, which it calls.
"""

from __future__ import annotations

import json
import logging
import math
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from verl.batch import TokenBatch
from verl.config.engine_kwargs import is_approximate
from verl.engine import Score
from verl.errors import MismatchError
from verl.files import atomic_write
from verl.json_files import read_object
from verl.model_files import load_tokenizer
from verl.single_controller.actors import RayWorkerGroup
from verl.trainer.hooks import Hook
from verl.training.devices import card_name, compute_dtype

if TYPE_CHECKING:
    from verl.trainer.build import Parts
    from verl.trainer.loop import RayPPOTrainer

logger = logging.getLogger(__name__)

LENGTH = 32
"""Tokens of the sequence: enough to average over, and computed in one small forward pass."""
OUTLIERS = 0.1
"""Share of the tokens whose differences, the largest, are not counted."""
FLOORS = {"float32": 1e-4}
"""Smallest allowed difference in nats, by the engines' dtype."""
HALF_FLOOR = 0.02
"""The same for dtypes of 16 bits."""
FACTOR = 4.0
"""Allowed difference, as a multiple of the one at the start, or of the latest ones: rounding grows
with the sizes of weights and log-probs."""
NUM_RECENT = 8
"""Number of an engine's latest differences that the next one is compared with."""
CAPS = {"float32": 1e-3}
"""Difference in nats up to which rounding may have grown since the start."""
HALF_CAP = 0.2
"""The same for dtypes of 16 bits."""
STARTS = {"float32": 0.1}
"""Largest difference at the start, in nats, that can be rounding."""
HALF_START = 1.0
"""The same for dtypes of 16 bits."""
STALE = {"float32": 1e-6}
"""Change of the ranks' log-probs, in nats, that must change an engine's too."""
HALF_STALE = 1e-3
"""The same for dtypes of 16 bits."""
NUM_KEPT = 8
"""Versions of the ranks' log-probs that are kept, for engines that load weights later."""
FILE = "canary.json"
"""File of a run's folder with the difference at its start, which a resumed run is held to."""


class Ranks(Protocol):
    """The training ranks, as far as the canary needs them."""

    group: RayWorkerGroup
    """Those that hold the actor."""


def choose_ids(tokenizer: Any, seed: int, length: int) -> tuple[int, ...]:
    """Choose ids of the vocabulary at random, without special or added tokens."""
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    usable = sorted(set(tokenizer.get_vocab().values()) - special)
    return tuple(random.Random(f"canary {seed}").choices(usable, k=length))


@dataclass(frozen=True)
class Expected:
    """What the ranks compute for the sequence with one version of the weights."""

    step: int
    log_probs: Sequence[float]


@dataclass
class WeightCanary:
    """Transfers weights, and compares ranks and engines after each transfer."""

    ids: Sequence[int]
    dtype: str
    """The coarser dtype of ranks and engines, which determines how much rounding is possible."""
    transfer: Callable[[Any, Any, int], dict[str, float]]
    """Sends the weights from ranks to engines, as a version; returns the seconds of each part."""
    file: Path | None = None
    """Keeps the difference at the start for the resumed run; None: nothing is kept."""
    setting: str = ""
    """What rounding depends on: a resumed run in another setting measures its start again."""
    is_approximate: bool = False
    """Whether the engines round weights or caches to 8 bits, so that no start is too different."""
    level: float | None = None
    """Largest difference of any engine at the start, in nats."""
    _is_resumed: bool | None = None
    _expected: dict[int, Expected] = field(default_factory=dict)
    """By version of the weights."""
    _last: dict[int, tuple[Score, Expected]] = field(default_factory=dict)
    """The last score of each engine that differed from the one before it."""
    _recent: dict[int, deque[float]] = field(default_factory=dict)
    """The latest differences of each engine, in nats."""
    _unable: set[int] = field(default_factory=set)

    def __call__(self, ranks: Ranks, rollouts: Any, version: int) -> dict[str, float]:
        """Transfer the weights of `version`; return the seconds of each part.

        `rollouts` are `TrainedRollouts`: a run without engines has no canary. Raises MismatchError
        if an engine does not have the weights of its version.
        """
        start = time.perf_counter()
        rollouts.scores.ids = self.ids
        self._is_resumed = version > 1 if self._is_resumed is None else self._is_resumed
        tokens = torch.tensor(self.ids)
        columns = {"input_ids": tokens, "policy_mask": torch.ones(len(tokens), dtype=torch.bool)}
        batch = TokenBatch(torch.tensor([0, len(tokens)]), columns)
        log_probs = ranks.group.call("actor.log_probs", batch, 1.0)[0][1:]  # at temperature 1
        self._expected[version] = Expected(version - 1, log_probs.tolist())
        for old in sorted(self._expected)[:-NUM_KEPT]:
            del self._expected[old]
        seconds = time.perf_counter() - start
        parts = self.transfer(ranks, rollouts, version)
        self.compare(rollouts.scores.take())
        return {**parts, "canary": seconds}

    def compare(self, scores: Sequence[Score]) -> None:
        """Compare the engines' scores with the ranks' of the same version."""
        able = [score for score in scores if score.log_probs is not None]
        for score in scores:
            if score.log_probs is None and score.replica not in self._unable:
                self._unable.add(score.replica)
                logger.warning("canary: engine %d gives no log-probs of a prompt, so its weights "
                               "are not checked", score.replica)  # fmt: skip
        if self.level is None and able:
            self._measure_start(able)
        for score in able:
            self._check(score)

    def _measure_start(self, scores: Sequence[Score]) -> None:
        """Set `level`: from the file for a resumed run, else from the first scores."""
        self.level = max(self._difference(score) for score in scores)
        known = _read(self.file) if self._is_resumed else {}
        if known.get("setting") == self.setting and isinstance(known.get("level"), float):
            self.level = float(known["level"])
            return
        largest = STARTS.get(self.dtype, HALF_START)
        if not self.is_approximate and not self.level <= largest:
            worst = max(scores, key=self._difference)
            raise MismatchError(
                f"engine {worst.replica} and the trainer compute different log-probs with the same "
                f"weights: {self._facts(worst)}; expected at most {largest:g}, the rounding of "
                f"{self.dtype}; the model is computed differently by one of them "
                "(trainer.canary=false accepts it)"
            )
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(self.file) as part:
                part.write_text(json.dumps({"setting": self.setting, "level": self.level}) + "\n")

    def limit(self, replica: int) -> float:
        """Return the allowed difference of an engine, in nats."""
        assert self.level is not None, "the start is measured first"
        recent = FACTOR * max(self._recent.get(replica, ()), default=0.0)
        grown = min(recent, CAPS.get(self.dtype, HALF_CAP))
        return max(FLOORS.get(self.dtype, HALF_FLOOR), FACTOR * self.level, grown)

    def _check(self, score: Score) -> None:
        """Raise MismatchError if an engine does not have the weights of its version."""
        expected = self._expected.get(score.version)
        if expected is None:  # so old that nobody waits for it
            return
        last, last_expected = self._last.setdefault(score.replica, (score, expected))
        is_same = score.log_probs == last.log_probs
        change = usual_difference(expected.log_probs, last_expected.log_probs)
        is_stale = is_same and change > STALE.get(self.dtype, HALF_STALE)
        difference, limit = self._difference(score), self.limit(score.replica)
        if is_stale or not difference <= limit:
            cause = "a tensor, the head or an adapter may be old"
            if (old := last_expected.step if is_stale else self._step_of(score)) is not None:
                cause = f"its log-probs are those of step {old}"
            raise MismatchError(
                f"engine {score.replica} does not have the weights of step {expected.step}: "
                f"{self._facts(score)}; expected at most {limit:.2g}; {cause} "
                "(docs/guides/guard.md)"
            )
        self._recent.setdefault(score.replica, deque(maxlen=NUM_RECENT)).append(difference)
        if not is_same:
            self._last[score.replica] = score, expected

    def _step_of(self, score: Score) -> int | None:
        """Return the latest earlier step whose weights explain an engine's log-probs."""
        assert score.log_probs is not None
        for version in sorted((v for v in self._expected if v < score.version), reverse=True):
            expected = self._expected[version]
            if usual_difference(score.log_probs, expected.log_probs) <= self.limit(score.replica):
                return expected.step
        return None

    def _difference(self, score: Score) -> float:
        """Return the difference between an engine's log-probs and the ranks', in nats a token."""
        assert score.log_probs is not None
        return usual_difference(score.log_probs, self._expected[score.version].log_probs)

    def _facts(self, score: Score) -> str:
        assert score.log_probs is not None
        ranks = self._expected[score.version].log_probs
        trainer, engine = (sum(x) / len(x) for x in (ranks, score.log_probs))
        return (
            f"log-probs of the canary differ by {self._difference(score):.2g} nats a token "
            f"(mean of the trainer {trainer:.6g}, of the engine {engine:.6g})"
        )


class Canary(Hook):
    """Puts a canary around the transfer of weights."""

    def __init__(self, canary: WeightCanary) -> None:
        self.canary = canary

    def on_start(self, trainer: RayPPOTrainer) -> None:
        """Transfer by the canary from the first weights on."""
        trainer.transfer = self.canary


def hook(parts: Parts) -> Canary | None:
    """Return the hook of a run with `trainer.canary`; without engines there is nothing to check."""
    config = parts.config
    if not (config.trainer.canary and config.samples_rollouts):
        return None
    rollout, seed = config.actor_rollout_ref.rollout, config.trainer.seed
    tokenizer = load_tokenizer(config.actor_rollout_ref.model.path)
    card, computed = parts.on_rank(card_name), parts.on_rank(compute_dtype)
    sampled = parts.dtype
    canary = WeightCanary(
        choose_ids(tokenizer, seed, min(LENGTH, config.data.max_model_len - 1)),
        sampled if computed == "float32" else computed,
        parts.transfer,
        parts.directory / FILE,
        setting=f"{seed} {rollout.name} {sampled} {computed} on {'cuda' if card else 'cpu'}",
        is_approximate=is_approximate(rollout.engine_kwargs),
    )
    return Canary(canary)


def usual_difference(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the mean absolute difference of log-probs without the largest `OUTLIERS` of them.

    Infinite if a log-prob is not finite. Now and then a norm divides by almost nothing, and one
    token's rounding grows ten thousand times; other weights change nearly all tokens.
    """
    differences = sorted(abs(a - b) for a, b in zip(one, other, strict=True))
    if not all(map(math.isfinite, differences)):
        return math.inf
    usual = differences[: len(differences) - int(OUTLIERS * len(differences))]
    return sum(usual) / len(usual)


def _read(file: Path | None) -> Mapping[str, Any]:
    """Return the content of `FILE`; empty if there is none, or it is damaged."""
    try:
        return {} if file is None else read_object(file)
    except (OSError, ValueError):
        return {}
