"""Rewards for a well-formed dialogue: the v0.3 recipe of Search-R1, and R1-Searcher's two stages.

A valid dialogue is think, then (search, information, think) any number of times, then answer, with
only white space in between. An observation counts as a single symbol, so that text in a document
can neither break nor fake the format; an ``<information>`` that the policy wrote is an error. If
the chat template or the environment already opened or closed ``<think>``, the policy continues from
there. Documents that the environment gave before the first turn may come first. The tags come from
the dialogue's grammar. In grammars that search inside the think block, a valid dialogue is one
think block with (search, information) any number of times, then the answer.

In the first stage of R1-Searcher (Song et al. 2025) the policy learns to search, in the second to
answer.
"""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence

from search_r1.agent.grammar import (
    SEARCH_R1,
    Grammar,
    find_information,
    tag_pattern,
    think_ending_patterns,
)
from search_r1.rewards.f1 import compare_answer
from search_r1.rewards.interface import Origin, RewardInput, RewardOutput, RewardScores
from search_r1.rewards.normalize import OPPOSITES, contains_answer, normalize_accepted

END_OF_SEQUENCE = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<|eot|>",
    "<end_of_turn>",
    "<turn|>",
    "<eos>",
    "</s>",
    "<|end|>",
    "<|return|>",
    "<|user|>",
    "<|observation|>",
    "[|endofturn|]",
    "<|END_OF_TURN_TOKEN|>",
    "<｜end▁of▁sentence｜>",
    "<seed:eos>",
)
"""End-of-turn texts of Qwen, SmolLM, Llama 3 and 4, Gemma, Llama 2, Mistral, Phi, gpt-oss, GLM,
EXAONE, Cohere, DeepSeek and Seed models."""


# A dialogue is encoded with one letter per part: T and t open and close a think block, S and s a
# call, A and a the answer; O is an observation with documents, x is text, ! is never allowed. Every
# part contains text: tags around nothing would be the cheapest valid dialogue.
_VALID = re.compile(r"O?(?:Tx+tSx+sO)*Tx+tAx+a")
_VALID_OF_TURNS = re.compile(r"O?(?:Tx+t(?:Sx+s)+O)*Tx+tAx+a")
_VALID_WITHIN_THINK = re.compile(r"O?T(?!t)x*(?:Sx+sOx*)*tAx+a")


@functools.cache
def _tag_letters(grammar: Grammar) -> Mapping[str, str]:
    tags = [("T", "t", grammar.think), ("A", "a", grammar.answer)]
    tags += [("S", "s", call) for call in grammar.calls]
    opening = {tag.opening: letter for letter, _, tag in tags}
    return opening | {tag.closing: letter for _, letter, tag in tags}


def strip_end_of_sequence(text: str) -> str:
    """Strip end-of-sequence texts and white space from the end."""
    text = text.rstrip()
    while token := next(filter(text.endswith, END_OF_SEQUENCE), None):
        text = text.removesuffix(token).rstrip()
    return text


def _encode_segment(origin: Origin, text: str, grammar: Grammar) -> str:
    if origin == "policy":
        tags, letters = tag_pattern(grammar), _tag_letters(grammar)
        parts = (part for part in tags.split(text) if part.strip())
        return "".join(letters.get(p, "!") if tags.fullmatch(p) else "x" for p in parts)
    # A prompt or observation may end with a think block that the policy continues after.
    closed, opened = think_ending_patterns(grammar)
    think = "Txt" if closed.search(text) else "T" if opened.search(text) else ""
    if origin == "prompt":
        return think
    if grammar.acts_in_think:  # the think block is already open when documents arrive
        think = think.removeprefix("T")
    return ("!" if find_information(text, grammar) is None else "O") + think


def is_valid_dialogue(segments: Sequence[tuple[Origin, str]], grammar: Grammar = SEARCH_R1) -> bool:
    """Whether a dialogue is valid as defined above; end-of-sequence texts may follow the answer.

    They may follow every turn of a grammar whose turns end so, which may have several calls each.
    """
    letters, last = "", len(segments) - 1
    for index, (origin, text) in enumerate(segments):
        if origin == "policy" and (index == last or grammar.ends_at_eos):
            text = strip_end_of_sequence(text)
        letters += _encode_segment(origin, text, grammar)
    valid = _VALID_OF_TURNS if grammar.ends_at_eos else _VALID
    valid = _VALID_WITHIN_THINK if grammar.acts_in_think else valid
    return valid.fullmatch(letters) is not None


def documents(dialogue: RewardInput) -> Iterator[str]:
    """Yield the texts between information tags in observations."""
    for origin, text in dialogue.segments:
        information = find_information(text, dialogue.grammar) if origin == "observation" else None
        if information is not None:
            yield information


def _is_retrieved(dialogue: RewardInput) -> bool:
    """Whether a document contains an accepted answer other than yes and no, which most contain."""
    normalize = dialogue.normalize
    accepted = [
        gold
        for gold in dialogue.ground_truth
        if normalize_accepted(gold, normalize) not in OPPOSITES
    ]
    return any(contains_answer(text, accepted, normalize) for text in documents(dialogue))


def score_em_format(dialogue: RewardInput, scores: RewardScores) -> RewardOutput:
    """Score the answer and the format of the dialogue.

    A correct answer scores 1, minus ``structure_format_score`` if the dialogue is invalid. Without
    a correct answer, a valid dialogue scores ``structure_format_score``, plus ``retrieval_score``
    if its documents contain an accepted answer; an invalid dialogue scores ``final_format_score``
    with an answer and 0 without. An answer beside an answer tag that was left open is not correct.
    """
    answer = dialogue.answer
    is_exact = dialogue.is_exact
    is_correct = is_exact and not leaves_answer_open(dialogue.policy_texts, dialogue.grammar)
    is_valid = is_valid_dialogue(dialogue.segments, dialogue.grammar)
    is_retrieved = _is_retrieved(dialogue)
    if is_correct:
        score = 1.0 if is_valid else 1.0 - scores.structure_format_score
    elif is_valid:
        score = scores.structure_format_score + is_retrieved * scores.retrieval_score
    else:
        score = scores.final_format_score if answer is not None else 0.0
    components = {
        "em": float(is_exact),
        "answered": float(answer is not None),
        "format_valid": float(is_valid),
        "retrieval_hit": float(is_retrieved),
    }
    return RewardOutput(score, components)


def leaves_answer_open(policy_texts: Sequence[str], grammar: Grammar) -> bool:
    """Whether an answer tag is opened again, or a turn ends, before it is closed.

    Example: ``"<answer>Rome <answer>Paris</answer>"`` leaves the first one open.
    """
    opening, closing = grammar.answer.opening, grammar.answer.closing
    return any(closing not in part for text in policy_texts for part in text.split(opening)[1:])


RETRIEVAL_REWARD = 0.5
FORMAT_REWARD = 0.5
FORMAT_PENALTY = 2.0


def score_stage_1(dialogue: RewardInput, scores: RewardScores) -> RewardOutput:
    """Score 0.5 for at least one search and 0.5 for a valid dialogue, whatever the answer is."""
    components = _compare_with_format(dialogue)
    searched = float(dialogue.num_searches > 0)
    score = RETRIEVAL_REWARD * searched + FORMAT_REWARD * components["format_valid"]
    return RewardOutput(score, {**components, "searched": searched})


def score_stage_2(dialogue: RewardInput, scores: RewardScores) -> RewardOutput:
    """Score the answer's F1, minus 2 for an invalid dialogue."""
    components = _compare_with_format(dialogue)
    score = components["f1"] - FORMAT_PENALTY * (1.0 - components["format_valid"])
    return RewardOutput(score, components)


def _compare_with_format(dialogue: RewardInput) -> dict[str, float]:
    is_valid = is_valid_dialogue(dialogue.segments, dialogue.grammar)
    return {**compare_answer(dialogue), "format_valid": float(is_valid)}
