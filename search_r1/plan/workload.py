"""The dialogues of a training step, drawn from distributions or from those that a run recorded."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

P99 = NormalDist().inv_cdf(0.99)
"""The 99th percentile of the standard normal distribution."""


@dataclass(frozen=True)
class LogNormal:
    """Log-normal distribution by median and 99th percentile; a constant if they are equal."""

    p50: float
    p99: float

    def draw(self, count: int, random: np.random.Generator) -> np.ndarray:
        """Draw values, (count,)."""
        if self.p50 == 0:
            return np.zeros(count)
        return self.p50 * np.exp(self.sigma * random.standard_normal(count))

    @property
    def sigma(self) -> float:
        """Standard deviation of the values' logarithm."""
        return math.log(self.p99 / self.p50) / P99


@dataclass(frozen=True)
class Turn:
    """One turn, and the search that follows it, if any."""

    tokens: int
    """Tokens that the policy samples."""
    observation_tokens: int = 0
    """Tokens that the search adds to the dialogue."""
    search_s: float = 0.0
    """Seconds of the search."""


@dataclass(frozen=True)
class Dialogue:
    """The token counts and search times of one trajectory."""

    prompt_tokens: int
    turns: tuple[Turn, ...]

    @property
    def policy_tokens(self) -> int:
        """Tokens that the policy samples in all turns."""
        return sum(turn.tokens for turn in self.turns)

    @property
    def length(self) -> int:
        observed = sum(turn.observation_tokens for turn in self.turns)
        return self.prompt_tokens + self.policy_tokens + observed


@dataclass(frozen=True)
class Batch:
    """The dialogues of one training step; those of a group are next to each other."""

    dialogues: tuple[Dialogue, ...]
    group_size: int

    @property
    def lengths(self) -> list[int]:
        """Tokens of each dialogue."""
        return [dialogue.length for dialogue in self.dialogues]

    @property
    def policy_tokens(self) -> int:
        """Tokens that the policy samples in all dialogues."""
        return sum(dialogue.policy_tokens for dialogue in self.dialogues)


@dataclass(frozen=True)
class Workload:
    """Size of a training step, and distributions of its dialogues."""

    num_prompts: int
    group_size: int
    prompt_tokens: LogNormal
    turn_tokens: LogNormal
    """Tokens that the policy samples in one turn."""
    observation_tokens: LogNormal
    search_shares: tuple[float, ...]
    """Relative number of the dialogues with 0, 1, 2 ... searches."""
    search_s: LogNormal
    max_turn_tokens: int
    max_observation_tokens: int
    recorded: tuple[Dialogue, ...] = ()
    """Dialogues of a run; if there are any, only the search times are drawn from a distribution."""

    def draw(self, seed: int) -> Batch:
        """Draw the dialogues of one step; the same seed gives the same dialogues."""
        random = np.random.default_rng(seed)
        if self.recorded:
            chosen = random.integers(len(self.recorded), size=self.num_prompts * self.group_size)
            dialogues = add_search_times([self.recorded[i] for i in chosen], self.search_s, random)
        else:
            dialogues = self._draw_dialogues(random)
        return Batch(tuple(dialogues), self.group_size)

    def _draw_dialogues(self, random: np.random.Generator) -> list[Dialogue]:
        count = self.num_prompts * self.group_size
        shares = np.array(self.search_shares) / sum(self.search_shares)
        searches = random.choice(len(shares), size=count, p=shares).tolist()
        prompts = _token_counts(self.prompt_tokens.draw(self.num_prompts, random))
        total = sum(searches) + count
        sampled = iter(_token_counts(self.turn_tokens.draw(total, random), self.max_turn_tokens))
        observations = self.observation_tokens.draw(total, random)
        observed = iter(_token_counts(observations, self.max_observation_tokens))
        times = iter(self.search_s.draw(total, random).tolist())
        dialogues = []
        for i, num_searches in enumerate(searches):
            turns = [Turn(next(sampled), next(observed), next(times)) for _ in range(num_searches)]
            turns.append(Turn(next(sampled)))
            dialogues.append(Dialogue(prompts[i // self.group_size], tuple(turns)))
        return dialogues


def _token_counts(values: np.ndarray, maximum: int | None = None) -> list[int]:
    """Round `values` to integers from 1 to `maximum`."""
    return [int(n) for n in np.clip(np.rint(values), 1, maximum)]


def add_search_times(
    dialogues: Sequence[Dialogue], search_s: LogNormal, random: np.random.Generator
) -> list[Dialogue]:
    """Draw the seconds of each search of recorded dialogues: of each turn with an observation."""
    times = iter(search_s.draw(sum(len(d.turns) for d in dialogues), random).tolist())
    timed = []
    for dialogue in dialogues:
        turns = [
            replace(turn, search_s=next(times) * (turn.observation_tokens > 0))
            for turn in dialogue.turns
        ]
        timed.append(replace(dialogue, turns=tuple(turns)))
    return timed
