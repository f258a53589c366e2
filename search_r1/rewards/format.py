"""Exact match with scores for a well-formed dialogue (the v0.3 recipe of Search-R1).

A dialogue is valid when it reads think, then search, information, think any number of times, then
answer, with nothing but white space in between. The order is checked over segments: an
observation counts as one whole, so that no text within a document can break or fake the form, and
an ``<information>`` that the policy wrote itself is an error. Where the chat template or the
environment already opened or closed ``<think>``, the policy continues from there. The tags are
those of the dialogue's grammar; where searches belong to the thinking, a valid dialogue is one
think with search, information any number of times within, then answer.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum, auto

from search_r1.agent.grammar import (
    SEARCH_R1,
    Grammar,
    handover_patterns,
    information_pattern,
    tag_pattern,
)
from search_r1.rewards.interface import (
    Origin,
    RewardFn,
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


class _State(Enum):
    START = auto()
    IN_THINK = auto()
    AFTER_THINK = auto()
    IN_SEARCH = auto()
    AFTER_SEARCH = auto()
    AFTER_INFORMATION = auto()
    IN_ANSWER = auto()
    AFTER_ANSWER = auto()


_OBSERVED = "observed"
_INSIDE = {_State.IN_THINK, _State.IN_SEARCH, _State.IN_ANSWER}
_Steps = Mapping[tuple[_State, str], _State]


@functools.cache
def _steps(grammar: Grammar) -> _Steps:
    """Which tag, or observation, leads from which state to which."""
    before_search, after_information = (
        (_State.IN_THINK, _State.IN_THINK)
        if grammar.acts_in_think
        else (_State.AFTER_THINK, _State.AFTER_INFORMATION)
    )
    steps = {
        (_State.START, grammar.think.opening): _State.IN_THINK,
        (_State.AFTER_INFORMATION, grammar.think.opening): _State.IN_THINK,
        (_State.IN_THINK, grammar.think.closing): _State.AFTER_THINK,
        (_State.AFTER_SEARCH, _OBSERVED): after_information,
        (_State.AFTER_THINK, grammar.answer.opening): _State.IN_ANSWER,
        (_State.IN_ANSWER, grammar.answer.closing): _State.AFTER_ANSWER,
    }
    for call in grammar.calls:
        steps[before_search, call.opening] = _State.IN_SEARCH
        steps[_State.IN_SEARCH, call.closing] = _State.AFTER_SEARCH
    return steps


def _without_end_of_sequence(text: str) -> str:
    """Drop end-of-sequence texts and white space from the end."""
    stripped = text.rstrip()
    while stripped.endswith(END_OF_SEQUENCE):
        token = next(t for t in END_OF_SEQUENCE if stripped.endswith(t))
        stripped = stripped.removesuffix(token).rstrip()
    return stripped


def _handed_over(text: str, state: _State, grammar: Grammar) -> _State:
    """Return the state in which the policy takes over after a text it did not write."""
    closed, opened = handover_patterns(grammar)
    if closed.search(text):
        return _State.AFTER_THINK
    return _State.IN_THINK if opened.search(text) else state


def _after_policy(text: str, state: _State, grammar: Grammar) -> _State | None:
    pattern = tag_pattern(grammar)
    for part in pattern.split(text):
        if pattern.fullmatch(part):
            following = _steps(grammar).get((state, part))
            if following is None:
                return None
            state = following
        elif part.strip() and state not in _INSIDE:
            return None
    return state


def _after_segment(origin: Origin, text: str, state: _State, grammar: Grammar) -> _State | None:
    """Advance over one segment; None when it breaks the form."""
    if origin == "prompt":
        return _handed_over(text, state, grammar)
    if origin == "policy":
        return _after_policy(text, state, grammar)
    is_documents = information_pattern(grammar).search(text)
    following = _steps(grammar).get((state, _OBSERVED)) if is_documents else None
    return None if following is None else _handed_over(text, following, grammar)


def is_valid_dialogue(segments: Sequence[tuple[Origin, str]], grammar: Grammar = SEARCH_R1) -> bool:
    """Tell whether the response keeps to think → (search → information → think)* → answer.

    With searches in the thinking it is think[(search → information)*] → answer. An end-of-sequence
    text may follow the answer, not come before it.
    """
    state = _State.START
    last = len(segments) - 1
    for index, (origin, text) in enumerate(segments):
        ending = index == last and origin == "policy"
        written = _without_end_of_sequence(text) if ending else text
        following = _after_segment(origin, written, state, grammar)
        if following is None:
            return False
        state = following
    return state is _State.AFTER_ANSWER


def documents(dialogue: RewardInput) -> Iterator[str]:
    """What stood between information tags, in observations only."""
    for origin, text in dialogue.segments:
        if origin == "observation":
            yield from information_pattern(dialogue.grammar).findall(text)


def build_em_format(scores: RewardScores) -> RewardFn:
    """Score the answer and the form of the dialogue.

    A correct answer scores 1, less ``structure_format_score`` in an invalid dialogue. Otherwise a
    valid dialogue scores ``structure_format_score``, plus ``retrieval_score`` when its documents
    hold an accepted answer; an invalid one ``final_format_score`` with an answer, 0 without.
    """

    def score_em_format(dialogue: RewardInput) -> RewardOutput:
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

    return score_em_format
