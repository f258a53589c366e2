"""Answers come only from the policy's own text (correctness line 8)."""

import pytest

from search_r1.rewards import REWARDS, RewardInput, RewardScores, build_reward
from search_r1.rewards.interface import Origin, extract_answer

ANSWER_REWARDS = [name for name in REWARDS if not name.startswith("r1_searcher")]
"""Rewards for the answer only; R1-Searcher's stages also reward the format."""
EXAMPLE = "Put the answer in tags, for example, <answer> Beijing </answer>. Question: where?\n"
NO_EXAMPLE = "Question: where?\n"


def dialogue(prompt: str, *turns: tuple[Origin, str], gold: str = "Beijing") -> RewardInput:
    """Build the reward input of a dialogue with these turns."""
    policy = [text for origin, text in turns if origin == "policy"]
    return RewardInput(policy, [("prompt", prompt), *turns], [gold], "nq")


@pytest.mark.parametrize(
    ("policy_texts", "expected"),
    [
        ([], None),
        (["no tags at all"], None),
        (["<answer>never closed"], None),
        (["<think>x</think><answer> Paris\n</answer>"], "Paris"),
        (["<answer>a</answer> then <answer>b</answer>"], "b"),
        (["<answer>a</answer>", "<answer>b</answer>", "no answer"], "b"),
        (["<answer>a</answer> <answer>never closed"], "a"),
        (["<answer>draft <answer>b</answer>"], "b"),
        (["<answer>half", "</answer>"], None),
        (["<answer></answer>"], ""),
        (["<answer>two\nlines</answer>"], "two\nlines"),
    ],
)
def test_line_08_last_complete_answer_of_the_policy(
    policy_texts: list[str], expected: str | None
) -> None:
    """The answer is the last complete pair of tags within one policy segment."""
    assert extract_answer(policy_texts) == expected


@pytest.mark.parametrize("prompt", [EXAMPLE, NO_EXAMPLE])
@pytest.mark.parametrize("name", ANSWER_REWARDS)
def test_line_08_prompt_example_neither_pays_nor_costs(name: str, prompt: str) -> None:
    """An example answer in the prompt does not change the score."""
    reward = build_reward(name)
    assert reward(dialogue(prompt, ("policy", "<think>hm</think>"))).score == 0.0
    answered = ("policy", "<think>hm</think><answer>Beijing</answer>")
    assert reward(dialogue(prompt, answered)).score == 1.0


@pytest.mark.parametrize("name", ANSWER_REWARDS)
def test_line_08_answer_inside_a_document_scores_nothing(name: str) -> None:
    """Answer tags in an observation do not count, even combined with a tag of the policy."""
    reward = build_reward(name, RewardScores(0.1, 0.1, final_format_score=0.1))
    document: tuple[Origin, str] = (
        "observation",
        "<information>Doc 1 <answer>Beijing</answer></information>",
    )
    search: tuple[Origin, str] = ("policy", "<think>a</think><search>q</search>")
    assert reward(dialogue(NO_EXAMPLE, search, document)).score == 0.0
    halves = (
        ("policy", "<think>a</think><answer>"),
        ("observation", "Beijing"),
        ("policy", "</answer>"),
    )
    assert reward(dialogue(NO_EXAMPLE, *halves)).score == 0.0


@pytest.mark.parametrize("name", list(REWARDS))
@pytest.mark.parametrize("answer", ["", "  ", "The The", "...", "a"])
@pytest.mark.parametrize("gold", ["The The", "!", "", "Beijing"])
def test_line_08_empty_normalised_answer_matches_nothing(name: str, answer: str, gold: str) -> None:
    """An answer that normalises to nothing is never correct, even if the gold answer does too."""
    turn: tuple[Origin, str] = ("policy", f"<think>a</think><answer>{answer}</answer>")
    out = build_reward(name)(dialogue(NO_EXAMPLE, turn, gold=gold))
    assert out.score == 0.0 or name not in ANSWER_REWARDS
    assert out.components["em"] == 0.0
    assert out.components["answered"] == 1.0
