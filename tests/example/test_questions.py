"""The questions: no leak between the halves, no guessable answer, no shortcut."""

import re
from collections import Counter

import pytest

from example.questions import build_questions
from example.retrieval import Audit, PassageSearch
from example.world import Split, World, build_world, plain_words


def test_no_validation_entity_occurs_in_any_training_text(example):
    """Named or bridged, prompt or demonstration: a validation entity is new to the policy."""
    world = example.world
    hidden = {city.name.lower() for city in world.cities_of(Split.VALIDATION)}
    hidden |= {w for c in world.countries_of(Split.VALIDATION) for w in plain_words(c.name)}
    texts = [question.text for question in example.train]
    texts += [segment.text for demo in example.demonstrations for segment in demo.segments]
    seen = {word for text in texts for word in plain_words(text)}
    assert not seen & hidden
    bridges = {question.bridge for question in example.train if question.bridge}
    assert not bridges & {question.bridge for question in example.validation}


def test_no_answer_is_frequent(example):
    """Whoever always says the commonest validation answer scores below 5 %."""
    counts = Counter(answer for q in example.validation for answer in q.answers)
    assert max(counts.values()) < 0.05 * len(example.validation)


def test_answers_stand_in_the_last_passage_and_not_in_the_question(example):
    """The first gold form can be copied; the question gives nothing away."""
    texts = {passage.id: passage.text for passage in example.passages}
    for question in [*example.train, *example.validation]:
        numbers = re.findall(r"\d+", texts[question.hops[-1].passage_id])
        assert question.answers[0] in numbers
        assert not re.search(r"\d", question.text)


def test_a_two_hop_question_does_not_name_its_bridge(example):
    """The country is only in the first passage."""
    texts = {passage.id: passage.text for passage in example.passages}
    two_hop = [question for question in example.validation if question.bridge]
    assert len(two_hop) == 60
    for question in two_hop:
        assert question.bridge not in question.text
        assert question.bridge in texts[question.hops[0].passage_id]


def test_questions_of_a_half_are_distinct(example):
    """No question is asked twice."""
    for questions in (example.train, example.validation):
        assert len({question.text for question in questions}) == len(questions)


def test_planned_searches_work_and_one_search_is_not_enough(example):
    """BM25 finds at least 98 % of the planned passages first, and never both with one query."""
    assert example.audit.plan_share >= 0.98
    assert example.audit.leak_share == 0


def test_the_whole_question_does_not_bring_the_second_passage(example):
    """The same by hand, on the validation questions and with three documents."""
    search = PassageSearch(example.passages)
    for question in example.validation:
        found = {passage.id for passage in search.search([question.text], topk=3)[0]}
        assert len(question.hops) == 1 or question.hops[1].passage_id not in found


@pytest.mark.parametrize("audit", [Audit(0.9, 0.0), Audit(1.0, 0.1)])
def test_a_bad_audit_is_refused(audit):
    """The builder writes nothing that cannot be answered as planned."""
    with pytest.raises(ValueError, match="expected"):
        audit.check()


def test_too_small_a_world_is_refused():
    """The error says how many questions there are and how many are needed."""
    world = build_world()
    small = World(countries=world.countries[:3], cities=world.cities[:5])
    with pytest.raises(ValueError, match=r"got .* expected"):
        build_questions(small, Split.TRAIN)
