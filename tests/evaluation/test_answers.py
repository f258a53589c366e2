"""Reading the answer of a reply without tags."""

import pytest

from search_r1.agent.grammar import SEARCH_R1
from search_r1.evaluation.runner import read_untagged_answer


@pytest.mark.parametrize(("reply", "answer"), [
    ("Oslo<|im_end|>", "Oslo"),
    ("The answer is Oslo.", "Oslo."),
    ("The answer to this question is: Oslo<|im_end|>", "Oslo"),
    ("Answer: Oslo\nIt lies at a fjord.", "Oslo"),
    ("The first answer is Bergen.\nNo, the answer is Oslo", "Oslo"),
    ("<think> The answer is Bergen. </think> Oslo", "Oslo"),
    ("<answer> Oslo", "Oslo"),
    ("Oslo is the capital of Norway.", "Oslo is the capital of Norway."),
    ("This is where the answer lies. Oslo is the capital.",
     "This is where the answer lies. Oslo is the capital."),
    ("The answer is", "The answer is"),
    ("", ""),
])  # fmt: skip
def test_what_follows_the_answer_is_else_the_whole_reply(reply: str, answer: str) -> None:
    """The last "answer is" of a line counts, without thinking, tags and control tokens."""
    assert read_untagged_answer(reply, SEARCH_R1) == answer
