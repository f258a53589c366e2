"""What a step has to do: dialogues with their tokens and searches, from numbers or from a run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

P99 = NormalDist().inv_cdf(0.99)


@dataclass(frozen=True)
class LogNormal:
    """A positive quantity by its median and 99th percentile; a constant where both are equal."""

    p50: float
    p99: float

    def draw(self, count: int, random: np.random.Generator) -> np.ndarray:
        """(count,) values."""
        if self.p50 == 0:
            return np.zeros(count)
        return self.p50 * np.exp(self.sigma * random.standard_normal(count))

    @property
    def sigma(self) -> float:
        return math.log(self.p99 / self.p50) / P99


@dataclass(frozen=True)
class Turn:
    """What the policy samples, what the environment adds to it, and the seconds of that."""

    tokens: int
    observation_tokens: int = 0
    search_s: float = 0.0


@dataclass(frozen=True)
class Dialogue:
    """One trajectory, as far as its time depends on it."""

    prompt_tokens: int
    turns: tuple[Turn, ...]

    @property
    def policy_tokens(self) -> int:
        return sum(turn.tokens for turn in self.turns)

    @property
    def length(self) -> int:
        observed = sum(turn.observation_tokens for turn in self.turns)
        return self.prompt_tokens + self.policy_tokens + observed


@dataclass(frozen=True)
class Batch:
    """The dialogues of one training step; siblings of a group follow each other."""

    dialogues: tuple[Dialogue, ...]
    group_size: int

    @property
    def lengths(self) -> list[int]:
        return [dialogue.length for dialogue in self.dialogues]

    @property
    def policy_tokens(self) -> int:
        return sum(dialogue.policy_tokens for dialogue in self.dialogues)


@dataclass(frozen=True)
class Workload:
    """Distributions of the dialogues of a run."""

    num_prompts: int
    """Of a training step."""
    group_size: int
    """Dialogues of a prompt."""
    prompt_tokens: LogNormal
    turn_tokens: LogNormal
    """Sampled in one turn."""
    observation_tokens: LogNormal
    search_shares: tuple[float, ...]
    """How many of the dialogues search 0, 1, 2 ... times, as weights."""
    search_s: LogNormal
    max_turn_tokens: int
    max_observation_tokens: int
    recorded: tuple[Dialogue, ...] = ()
    """Dialogues of a run, drawn instead of the distributions; searches without time take theirs."""

    def draw(self, seed: int) -> Batch:
        """The dialogues of one step; equal seeds give equal ones."""
        random = np.random.default_rng(seed)
        if self.recorded:
            chosen = random.integers(len(self.recorded), size=self.num_prompts * self.group_size)
            some = add_search_times([self.recorded[i] for i in chosen], self.search_s, random)
        else:
            some = self._drawn(random)
        return Batch(tuple(some), self.group_size)

    def _drawn(self, random: np.random.Generator) -> list[Dialogue]:
        count = self.num_prompts * self.group_size
        shares = np.array(self.search_shares) / sum(self.search_shares)
        searches = random.choice(len(shares), size=count, p=shares).tolist()
        prompts = _tokens(self.prompt_tokens.draw(self.num_prompts, random))
        total = sum(searches) + count
        tokens = iter(_tokens(self.turn_tokens.draw(total, random), self.max_turn_tokens))
        observed = iter(
            _tokens(self.observation_tokens.draw(total, random), self.max_observation_tokens)
        )
        waits = iter(self.search_s.draw(total, random).tolist())
        return [
            Dialogue(
                prompts[i // self.group_size],
                (
                    *(Turn(next(tokens), next(observed), next(waits)) for _ in range(number)),
                    Turn(next(tokens)),
                ),
            )
            for i, number in enumerate(searches)
        ]


def _tokens(values: np.ndarray, longest: int | None = None) -> list[int]:
    """Whole numbers from 1 on."""
    return [int(n) for n in np.clip(np.rint(values), 1, longest)]


def add_search_times(
    dialogues: Sequence[Dialogue], search_s: LogNormal, random: np.random.Generator
) -> list[Dialogue]:
    """Recorded dialogues with seconds for each search: a turn to which something was added."""
    waits = iter(search_s.draw(sum(len(d.turns) for d in dialogues), random).tolist())
    return [
        Dialogue(
            one.prompt_tokens,
            tuple(replace(t, search_s=next(waits) * (t.observation_tokens > 0)) for t in one.turns),
        )
        for one in dialogues
    ]
