"""Finding the answer that the policy gave.

Only the texts of policy segments are read, each by itself: neither the prompt's example nor a
document can supply an answer, or one half of its tags.
"""

from collections.abc import Sequence

from search_r1.agent.grammar import SEARCH_R1, Grammar, answer_pattern


def extract_answer(policy_texts: Sequence[str], grammar: Grammar = SEARCH_R1) -> str | None:
    """Return the last complete ``<answer>…</answer>`` of the response, stripped; None without one.

    Example: ``["<search>q</search>", "<answer> Paris </answer>"]`` gives ``"Paris"``.
    """
    for text in reversed(policy_texts):
        found = answer_pattern(grammar).findall(text)
        if found:
            return str(found[-1]).strip()
    return None
