"""The measured configurations: drawn at random, with a fixed seed, from the ranges below."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from benchmarks.step_time.paced import Pace
from search_r1.plan.workload import P99, LogNormal, Workload

MIN_DIALOGUES, MAX_DIALOGUES = 40, 96
"""Bounds of the number of dialogues per step."""
STEP_S, SEQUENCE_S, PREFILL_TOKENS_S, SIGMA = 0.015, 0.0008, 8_000.0, 0.6
"""Settings of the paced engine. The model is given only SIGMA, the spread of turn lengths."""


@dataclass(frozen=True)
class Case:
    """One configuration of a step."""

    prompts: int
    group: int
    engines: int
    slots: int
    max_turns: int
    search_share: float
    search_p50: float
    search_p99: float
    words_p50: float
    letters: int
    """Characters of a document."""
    prompt: int
    """Tokens of a prompt."""

    @property
    def pace(self) -> Pace:
        """The pace of its engines."""
        return Pace(STEP_S, SEQUENCE_S, PREFILL_TOKENS_S, self.slots, self.words_p50, SIGMA,
                    self.search_share)  # fmt: skip

    def workload(self, wrapper_letters: float) -> Workload:
        """Describe the configuration to the model.

        `wrapper_letters`: characters that an observation adds around its document.
        """
        turns = LogNormal(self.words_p50, self.words_p50 * math.exp(SIGMA * P99))
        share = self.search_share
        searches = [share**n * (1 - share) for n in range(self.max_turns)]
        return Workload(
            self.prompts, self.group, LogNormal(self.prompt, self.prompt), turns,
            LogNormal(self.letters + wrapper_letters, self.letters + wrapper_letters),
            (*searches, share**self.max_turns), LogNormal(self.search_p50, self.search_p99),
            2000, 2000,
        )  # fmt: skip


def draw_cases(count: int, seed: int = 0) -> list[Case]:
    """Draw `count` distinct configurations of MIN_DIALOGUES to MAX_DIALOGUES dialogues."""
    draw = random.Random(seed)
    cases = dict[Case, None]()
    while len(cases) < count:
        p50, p99 = draw.choice([(0.02, 0.1), (0.1, 0.8), (0.3, 2.0), (0.5, 4.0)])
        case = Case(
            prompts=draw.choice([8, 12, 16, 24, 40]), group=draw.choice([2, 4, 5, 8]),
            engines=draw.choice([1, 2]), slots=draw.choice([8, 16, 32, 64]),
            max_turns=draw.choice([1, 2, 3, 4]), search_share=draw.choice([0.3, 0.6, 0.9]),
            search_p50=p50, search_p99=p99, words_p50=draw.choice([40.0, 60.0, 80.0]),
            letters=draw.choice([50, 150, 400]), prompt=draw.choice([100, 300]),
        )  # fmt: skip
        if MIN_DIALOGUES <= case.prompts * case.group <= MAX_DIALOGUES:
            cases[case] = None
    return list(cases)
