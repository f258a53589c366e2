"""From what the policy writes to what a chat client shows as its reasoning.

Thinking tags, control tokens and the search or answer that ends a turn are left out, since clients
get those in fields of their own. Text is given as soon as it cannot turn out to be such a tag.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from verl.agent.grammar import Grammar, action_pattern


class Thoughts:
    """The reasoning of one dialogue, turn by turn."""

    def __init__(self, tags: Grammar, special_tokens: Iterable[str] = ()) -> None:
        """`special_tokens` are control tokens of the policy's tokenizer, which nobody wants."""
        self._action = action_pattern(tags)
        self._openings = tuple(tag.opening for tag in (*tags.calls, tags.answer))
        hidden = [tags.think.opening, tags.think.closing, *filter(None, special_tokens)]
        self._hidden = re.compile("|".join(map(re.escape, hidden)))
        self._marks = (*self._openings, *hidden)
        self._turn, self._told, self._is_later = "", 0, False

    def say(self, text: str) -> str:
        """What can be shown now that the policy has said `text`."""
        self._turn += text
        places = [at for at in (self._turn.find(tag) for tag in self._openings) if at >= 0]
        end = min(places) if places else len(self._turn) - self._num_undecided()
        return self._show(self._turn[:end])

    def end_turn(self) -> str:
        """What else is to be shown of this turn, whose search or answer is complete."""
        shown = self._show(self._action.sub("", self._turn, count=1))
        self._is_later = self._is_later or self._told > 0
        self._turn, self._told = "", 0
        return shown

    def _show(self, text: str) -> str:
        """What of `text` was not given yet; an empty line parts the turns."""
        clean = self._hidden.sub("", text).strip()
        new = clean[self._told :]
        between = "\n\n" if new and not self._told and self._is_later else ""
        self._told += len(new)
        return between + new

    def _num_undecided(self) -> int:
        """Characters at the end that may be the beginning of a tag."""
        longest = max(map(len, self._marks)) - 1
        for count in range(min(longest, len(self._turn)), 0, -1):
            if any(mark.startswith(self._turn[-count:]) for mark in self._marks):
                return count
        return 0


def reasoning(turns: Iterable[str], tags: Grammar, special_tokens: Iterable[str] = ()) -> str:
    """The reasoning of a finished dialogue."""
    thoughts = Thoughts(tags, special_tokens)
    return "".join(part for turn in turns for part in (thoughts.say(turn), thoughts.end_turn()))
