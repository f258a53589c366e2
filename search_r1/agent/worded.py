"""Whether the prompts of data are worded as the template: as inference asks the policy."""

import logging
from collections.abc import Iterable
from itertools import islice

from search_r1.agent.question import question_line
from verl.agent.interface import DialogueFormat
from verl.types import Prompt

logger = logging.getLogger(__name__)

NUM_CHECKED = 1000
"""Rows that are looked at, the first ones."""


def warn_of_other_wording(format: DialogueFormat, prompts: Iterable[Prompt]) -> int:
    """Warn of prompts in another wording than the format's, and return their number.

    Prompts whose question cannot be found are left out.
    """
    asked = [(prompt, _question(prompt)) for prompt in islice(prompts, NUM_CHECKED)]
    known = [(prompt, question) for prompt, question in asked if question]
    other = [prompt for prompt, question in known
             if format.user_prompt(question).strip() not in prompt.text]  # fmt: skip
    if other:
        logger.warning(
            "%d of %d prompts, such as %s, have another wording than template %r, in which "
            "`infer` asks the policy; fix: `search-r1 data template --from FILE`, and "
            "template=template.yaml, or build the data with --template_type %s",
            len(other), len(known), other[0].uid, format.name, format.name,
        )  # fmt: skip
    return len(other)


def _question(prompt: Prompt) -> str:
    """Return the question as it stands in the prompt; empty if it is not found."""
    stored = prompt.extra_info.get("question")
    return question_line(prompt.text) or (stored.strip() if isinstance(stored, str) else "")
