"""The agent `folding`: when the context is full, documents of earlier turns leave it.

What the policy wrote about them stays, so its thoughts are the summary. The next turn begins a row
of its own: the prompt, the policy's turns so far, and the newest observation.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import takewhile
from typing import Self

from verl.agent.dialogue import DialogueAgent
from verl.agent.native import NativeFormat
from verl.config import Config
from verl.errors import ConfigError, explain
from verl.types import Origin, Segment, Trajectory

NAME = "folding"


@dataclass(frozen=True)
class Folding(DialogueAgent):
    """The built-in loop, which folds its context where the built-in one ends out of budget."""

    @classmethod
    def over(cls, agent: DialogueAgent, _config: Config) -> Self:
        """Return the run's agent with folding. Raises ConfigError for a template of messages."""
        if isinstance(agent.format, NativeFormat):
            # Chat templates refuse a call without its result.
            fix = "a template with tags, or agent.name=dialogue"
            got = f"{NAME} with template={agent.format.name}"
            raise ConfigError(explain("agent.name", got, "turns without roles", fix))
        return cls(agent.limits, agent.format, agent.environment, agent.tokenizer, agent.reserved)

    def _append(self, trajectory: Trajectory, response: Segment) -> bool:
        """Append an observation, if need be to a new row; return whether there was room."""
        if super()._append(trajectory, response):
            return True
        segments = trajectory.segments
        prompt = list(takewhile(lambda segment: segment.origin is Origin.PROMPT, segments))
        said = [segment.as_prompt() for segment in segments if segment.origin is Origin.POLICY]
        folded = [*prompt, *said, response]
        has_room = sum(s.num_tokens for s in folded) <= self.limits.max_prompt_length
        if has_room:
            segments += folded
        return has_room

    def _stats(self, counts: Counter[str], trajectory: Trajectory) -> dict[str, float]:
        """Return the built-in statistics, and the number of rows."""
        rows = 1.0 + len(trajectory.row_starts)
        return {**super()._stats(counts, trajectory), "rows": rows}
