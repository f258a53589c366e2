"""Scores for a well-formed dialogue: the v0.3 recipe of Search-R1, and R1-Searcher's two stages.

A dialogue is valid when it reads think, then search, information, think any number of times, then
answer, with nothing but white space in between. The order is checked over segments: an
observation counts as one whole, so that no text within a document can break or fake the form, and
an ``<information>`` that the policy wrote itself is an error. Where the chat template or the
environment already opened or closed ``<think>``, the policy continues from there. The tags are
those of the dialogue's grammar; where searches belong to the thinking, a valid dialogue is one
think with search, information any number of times within, then answer.

In the first stage of R1-Searcher (Song et al. 2025) a policy learns to search, in the second to
answer.
"""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence

from search_r1.agent.grammar import (
    SEARCH_R1,
    Grammar,
    information_pattern,
    tag_pattern,
    think_ending_patterns,
)
from search_r1.rewards.f1 import compared
from search_r1.rewards.interface import (
    Origin,
    RewardInput,
    RewardOutput,
    RewardScores,
)
from search_r1.rewards.normalize import covers, matches_exactly

END_OF_SEQUENCE = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<eos>",
    "</s>",
)
"""How the supported families end a turn (Qwen, SmolLM, Llama 3, Gemma, Llama 2 and Mistral)."""


# What a dialogue is made of, a letter each: T and t open and close a thought, S and s a call, A and
# a the answer; O is an observation of documents, x any text, ! what has no place in the form.
_FORM = re.compile(r"(?:Tx*tSx*sO)*Tx*tAx*a")
_FORM_WITHIN_THINK = re.compile(r"Tx*(?:Sx*sOx*)*tAx*a")


@functools.cache
def _letters(grammar: Grammar) -> Mapping[str, str]:
    tags = [("T", "t", grammar.think), ("A", "a", grammar.answer)]
    tags += [("S", "s", call) for call in grammar.calls]
    opening = {tag.opening: letter for letter, _, tag in tags}
    return opening | {tag.closing: letter for _, letter, tag in tags}


def _without_end_of_sequence(text: str) -> str:
    """Drop end-of-sequence texts and white space from the end."""
    stripped = text.rstrip()
    while stripped.endswith(END_OF_SEQUENCE):
        token = next(t for t in END_OF_SEQUENCE if stripped.endswith(t))
        stripped = stripped.removesuffix(token).rstrip()
    return stripped


def _spelled(origin: Origin, text: str, grammar: Grammar) -> str:
    if origin == "policy":
        tags, letters = tag_pattern(grammar), _letters(grammar)
        parts = (part for part in tags.split(text) if part.strip())
        return "".join(letters.get(p, "!") if tags.fullmatch(p) else "x" for p in parts)
    closed, opened = think_ending_patterns(grammar)
    handed_over = "Tt" if closed.search(text) else "T" if opened.search(text) else ""
    if origin == "prompt":
        return handed_over
    # Where searches belong to the thinking, it is open already when the documents come.
    handed_over = handed_over.removeprefix("T") if grammar.acts_in_think else handed_over
    return ("O" if information_pattern(grammar).search(text) else "!") + handed_over


def is_valid_dialogue(segments: Sequence[tuple[Origin, str]], grammar: Grammar = SEARCH_R1) -> bool:
    """Tell whether the response keeps to think → (search → information → think)* → answer.

    With searches in the thinking it is think[(search → information)*] → answer. An end-of-sequence
    text may follow the answer, not come before it.
    """
    letters, last = "", len(segments) - 1
    for index, (origin, text) in enumerate(segments):
        is_end = index == last and origin == "policy"
        letters += _spelled(origin, _without_end_of_sequence(text) if is_end else text, grammar)
    form = _FORM_WITHIN_THINK if grammar.acts_in_think else _FORM
    return form.fullmatch(letters) is not None


def documents(dialogue: RewardInput) -> Iterator[str]:
    """What stood between information tags, in observations only."""
    for origin, text in dialogue.segments:
        if origin == "observation":
            yield from information_pattern(dialogue.grammar).findall(text)


def score_em_format(dialogue: RewardInput, scores: RewardScores) -> RewardOutput:
    """Score the answer and the form of the dialogue.

    A correct answer scores 1, less ``structure_format_score`` in an invalid dialogue. Otherwise a
    valid dialogue scores ``structure_format_score``, plus ``retrieval_score`` when its documents
    hold an accepted answer; an invalid one ``final_format_score`` with an answer, 0 without.
    """
    answer = dialogue.answer
    is_correct = answer is not None and matches_exactly(answer, dialogue.ground_truth)
    is_valid = is_valid_dialogue(dialogue.segments, dialogue.grammar)
    is_retrieved = any(covers(d, dialogue.ground_truth) for d in documents(dialogue))
    if is_correct:
        score = 1.0 if is_valid else 1.0 - scores.structure_format_score
    elif is_valid:
        score = scores.structure_format_score + is_retrieved * scores.retrieval_score
    else:
        score = scores.final_format_score if answer is not None else 0.0
    components = {
        "em": float(is_correct),
        "has_answer": float(answer is not None),
        "format_valid": float(is_valid),
        "retrieval_hit": float(is_retrieved),
    }
    return RewardOutput(score, components)


RETRIEVAL_REWARD = 0.5
FORMAT_REWARD = 0.5
FORMAT_PENALTY = 2.0


def score_stage_1(dialogue: RewardInput, scores: RewardScores) -> RewardOutput:
    """Score 0.5 for at least one search and 0.5 for a valid dialogue; the answer has no say."""
    components = _components(dialogue)
    searched = float(dialogue.num_searches > 0)
    score = RETRIEVAL_REWARD * searched + FORMAT_REWARD * components["format_valid"]
    return RewardOutput(score, {**components, "searched": searched})


def score_stage_2(dialogue: RewardInput, scores: RewardScores) -> RewardOutput:
    """Score the answer's F1, less 2 for an invalid dialogue."""
    components = _components(dialogue)
    score = components["f1"] - FORMAT_PENALTY * (1.0 - components["format_valid"])
    return RewardOutput(score, components)


def _components(dialogue: RewardInput) -> dict[str, float]:
    is_valid = is_valid_dialogue(dialogue.segments, dialogue.grammar)
    return {**compared(dialogue), "format_valid": float(is_valid)}
