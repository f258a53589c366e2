"""What a policy could write to be paid without being right: lists, parts of words, tags."""

import pytest

from search_r1.agent.grammar import R1_SEARCHER, SEARCH_R1
from search_r1.rewards import RewardInput, RewardOutput, RewardScores, build_reward
from search_r1.rewards.format import is_valid_dialogue, leaves_answer_open
from search_r1.rewards.interface import Origin
from search_r1.rewards.normalize import MAX_EXTRA_WORDS, contains_answer, covers

SCORES = RewardScores(structure_format_score=0.2, final_format_score=0.1, retrieval_score=0.1)
NAMES = [f"name{number}" for number in range(300)]


def score(
    *policy: str, gold: str = "Paris", name: str = "em_format", document: str = ""
) -> RewardOutput:
    """Score a dialogue of these policy turns, with one document after each but the last."""
    segments: list[tuple[Origin, str]] = []
    for number, text in enumerate(policy):
        segments.append(("policy", text))
        if number + 1 < len(policy):
            segments.append(("observation", f"<information>{document}</information>"))
    return build_reward(name, SCORES)(RewardInput(policy, segments, [gold]))


@pytest.mark.parametrize(
    "policy",
    [
        ("<answer>Rome <answer>Paris</answer>",),
        ("<answer><answer>Paris</answer>",),
        ("<answer>Paris</answer> <answer>Rome",),
        (
            "<think>a</think><answer>Rome <search>q</search>",
            "<think>b</think><answer>Paris</answer>",
        ),
        ("<think>a</think><answer>" * 9 + "<answer>Paris</answer>",),
    ],
)
def test_an_answer_beside_an_open_one_scores_as_wrong(policy: tuple[str, ...]) -> None:
    """`em_format` pays `final_format_score`; the component em is what it is in other rewards."""
    out = score(*policy)
    assert (out.score, out.components["em"], out.components["format_valid"]) == (0.1, 1.0, 0.0)
    assert leaves_answer_open(policy, SEARCH_R1)
    assert score("so <answer>Paris</answer>").score == pytest.approx(0.8)
    assert score("so <answer>Paris").score == 0.0


@pytest.mark.parametrize(
    ("policy", "is_valid"),
    [
        ("<think>a</think><answer>b</answer>", True),
        ("<think></think><answer>b</answer>", False),
        ("<think> \n</think><answer>b</answer>", False),
        ("<think>a</think><answer></answer>", False),
        ("<think>a</think><answer> </answer>", False),
    ],
)
@pytest.mark.parametrize("grammar", [SEARCH_R1, R1_SEARCHER])
def test_tags_around_nothing_are_no_valid_dialogue(policy, is_valid, grammar) -> None:  # type: ignore[no-untyped-def]
    """A format reward pays for parts with content; a think block that the prompt closed is fine."""
    assert is_valid_dialogue([("policy", policy)], grammar) is is_valid
    closed: tuple[Origin, str] = ("prompt", "q <think>\n\n</think>\n\n")
    assert is_valid_dialogue([closed, ("policy", "<answer>b</answer>")], grammar)


def test_an_empty_query_is_no_valid_dialogue() -> None:
    """A search for nothing is not a search, whatever the environment answers."""
    turns = ("<think>a</think><search>{}</search>", "<think>b</think><answer>x</answer>")
    for query, expected in (("q", 1.0), ("", 0.0), ("  ", 0.0)):
        assert score(turns[0].format(query), turns[1]).components["format_valid"] == expected


@pytest.mark.parametrize(
    ("answer", "gold", "is_covered"),
    [
        (", ".join([*NAMES, "Paris"]), "Paris", False),
        ("Paris " * 300, "Paris", False),
        (" ".join(["Paris", *NAMES[:MAX_EXTRA_WORDS]]), "Paris", True),
        (" ".join(["Paris", *NAMES[: MAX_EXTRA_WORDS + 1]]), "Paris", False),
        (" ".join(["Great Wall", *NAMES[:MAX_EXTRA_WORDS]]), "the Great Wall", True),
        ("1234567890", "5", False), ("It is 5.", "5", True), ("0123456789 5", "5", True),
        ("Parisian", "Paris", False), ("comparison", "Paris", False),
        ("No, it is not", "no", True), ("nothing", "no", False), ("yes and no", "no", False),
        ("yes and no", "yes", False), ("Yes, it is", "yes", True),
        ("中国的首都是北京。", "北京", True), ("、".join("东南西北" * 20) + "北京", "北京", False),
        ("서울은 수도입니다", "서울", True), ("Jose\u0301", "Jose", False),
        ("theatre", "the", False), ("", "", False),
    ],
)  # fmt: skip
def test_cover_em_pays_for_whole_words_in_short_answers(
    answer: str, gold: str, is_covered: bool
) -> None:
    """No list of candidates, no part of a word, and no answer that says both yes and no."""
    assert covers(answer, [gold]) is is_covered
    tagged = f"<think>a</think><answer>{answer}</answer>"
    assert score(tagged, gold=gold, name="cover_em").score == float(is_covered)


@pytest.mark.parametrize(
    ("document", "gold", "is_held"),
    [
        ("The Normans had no king.", "no", False), ("yes", "Yes", False),
        ("Normandy", "Norman", False), ("In 1851 the city had 52 gates.", "5", False),
        ("It has 5 gates.", "5", True), ("The capital, Paris, is old.", "Paris", True),
        ("Paris–Nice", "Paris", True), ("word " * 500 + "Paris", "Paris", True),
        ("北京市是首都", "北京", True), ("the", "the", False),
    ],
)  # fmt: skip
def test_a_document_holds_whole_words(document: str, gold: str, is_held: bool) -> None:
    """`retrieval_score` pays for neither a part of a word nor a yes or no."""
    is_yes_or_no = gold.lower() in ("yes", "no")
    assert contains_answer(document, [gold]) is (is_held or is_yes_or_no)
    turns = ("<think>a</think><search>q</search>", "<think>b</think><answer>x</answer>")
    out = score(*turns, gold=gold, document=document)
    assert out.components["retrieval_hit"] == float(is_held)
    assert out.score == pytest.approx(0.2 + 0.1 * is_held)


def test_repeating_words_does_not_raise_f1() -> None:
    """Each repetition beyond those of the accepted answer lowers the precision."""
    scores = [
        score(f"<answer>{'Paris ' * times}</answer>", name="f1").score for times in (1, 2, 3, 300)
    ]
    assert scores == sorted(scores, reverse=True) and scores[-1] < 0.01
