"""Finding the answer that the policy gave.

Only the texts of policy segments are read, each by itself: neither the prompt's example nor a
document can supply an answer, or one half of its tags.
"""

import re
from collections.abc import Sequence

# An opening tag that is never closed does not swallow the next answer.
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


def extract_answer(policy_texts: Sequence[str]) -> str | None:
    """Return the last complete ``<answer>…</answer>`` of the response, stripped; None without one.

    Example: ``["<search>q</search>", "<answer> Paris </answer>"]`` gives ``"Paris"``.
    """
    for text in reversed(policy_texts):
        found = _ANSWER.findall(text)
        if found:
            return str(found[-1]).strip()
    return None
