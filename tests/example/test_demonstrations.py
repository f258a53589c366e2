"""The demonstrations: well-formed, real observations, and searching less than they should."""

import re

import pytest

from example.demonstrations import (
    CITY_SEARCH_SHARE,
    COUNTRY_SEARCH_SHARE,
    TOPK,
    TWO_HOP_SEARCH_SHARE,
    Origin,
)
from example.questions import TEMPLATE
from example.retrieval import PassageSearch
from search_r1.agent.tags import TEMPLATES

SEARCH_TURN = re.compile(r"<think> ([^<]+) </think> <search> ([^<]+) </search>")
ANSWER_TURN = re.compile(r"<think> ([^<]+) </think> <answer> (\d+) </answer>")


def texts(demonstration, origin):
    """The texts of one writer's segments."""
    return [segment.text for segment in demonstration.segments if segment.origin == origin]


def num_searches(demonstration):
    """How many searches a dialogue makes."""
    return len(texts(demonstration, Origin.OBSERVATION))


def test_every_dialogue_is_well_formed(example):
    """Searches, each followed by its observation, then one answer; thoughts of 12 words at most."""
    for demonstration in example.demonstrations:
        origins = [segment.origin for segment in demonstration.segments]
        assert origins == [Origin.POLICY, Origin.OBSERVATION] * (len(origins) // 2) + ["policy"]
        *searches, answer = texts(demonstration, Origin.POLICY)
        matches = [SEARCH_TURN.fullmatch(turn) for turn in searches]
        matches.append(ANSWER_TURN.fullmatch(answer))
        assert all(match and len(match[1].split()) <= 12 for match in matches)


def test_observations_are_what_bm25_brings(example):
    """No observation is made up."""
    search = PassageSearch(example.passages)
    for demonstration in example.demonstrations[:60]:
        queries = [SEARCH_TURN.fullmatch(t)[2] for t in texts(demonstration, "policy")[:-1]]
        wrapped = map(TEMPLATES[TEMPLATE].observation, search.search(queries, TOPK))
        assert list(wrapped) == texts(demonstration, Origin.OBSERVATION)


def test_enough_searches_copy_and_fewer_guess_wrongly(example):
    """With the last passage at hand the answer is right; without it, it never is."""
    for demonstration in example.demonstrations:
        answer = ANSWER_TURN.fullmatch(texts(demonstration, Origin.POLICY)[-1])[2]
        question = demonstration.question
        assert (answer in question.answers) == (num_searches(demonstration) == len(question.hops))


@pytest.mark.parametrize(
    ("is_kind", "share"),
    [
        (lambda q: q.fact is None, CITY_SEARCH_SHARE),
        (lambda q: q.fact is not None and q.bridge is None, COUNTRY_SEARCH_SHARE),
        (lambda q: q.bridge is not None, TWO_HOP_SEARCH_SHARE),
    ],
)
def test_the_gap_has_the_declared_size(example, is_kind, share):
    """The share of thorough dialogues holds for each kind, overall and in the first hundred."""
    for demonstrations in (example.demonstrations, example.demonstrations[:100]):
        kind = [demo for demo in demonstrations if is_kind(demo.question)]
        thorough = sum(num_searches(demo) == len(demo.question.hops) for demo in kind)
        assert abs(thorough - share * len(kind)) <= 1


def test_demonstrations_are_about_training_questions(example):
    """None is about a validation question."""
    assert {demo.question.split for demo in example.demonstrations} == {"train"}
