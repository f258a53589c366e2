"""Lists and objects that were saved as text are read or refused; ordinary text stays text."""

import json
from typing import Any

import numpy as np
import pytest

from verl.data.rows import parse_prompt, parse_targets
from verl.data.values import Unreadable, can_be_given, parse_structure, read_answers

NAMES = ("Jane Austen", "J. O'Austen", 'the "Bard"', "a, b", "línea\nzwei", "[sic]")


@pytest.mark.parametrize("save", [json.dumps, str, repr, lambda v: json.dumps(json.dumps(v))])
@pytest.mark.parametrize("form", [list, tuple, lambda v: {"target": v}, lambda v: {"text": v}])
def test_line_31_a_structure_saved_as_text_gives_its_answers(save: Any, form: Any) -> None:
    """Each way to save a list or object as text gives the answers that were saved."""
    assert read_answers(save(form(list(NAMES)))) == NAMES


@pytest.mark.parametrize("save", [str, repr])
def test_line_31_numpy_leaves_commas_out(save: Any) -> None:
    """Adjacent strings are two answers, where Python would join them."""
    assert read_answers(save(np.array(["Jane Austen", "J. Austen"]))) == (NAMES[0], "J. Austen")
    messages = np.array([{"role": "system", "content": "x"}, {"role": "user", "content": "Who?"}])
    assert parse_prompt(save(messages)) == tuple(messages)


@pytest.mark.parametrize("form", [list, tuple, lambda v: np.array(v, dtype=object), np.array,
                                  lambda v: [np.str_(text) for text in v]])  # fmt: skip
def test_line_31_numpy_within_an_object(form: Any) -> None:
    """A cell of pandas that holds an object with arrays, as `to_csv` writes it."""
    names = list(NAMES)
    assert parse_structure(str({"a": {"target": form(names)}, "b": ")"})) == {
        "a": {"target": tuple(names) if form is tuple else names}, "b": ")"}  # fmt: skip
    assert parse_structure("[{'a': array([1, 2], dtype=int64), 'b': 'np.array(x)'}]") == [
        {"a": [1, 2], "b": "np.array(x)"}
    ]


def test_line_31_a_long_repr_is_refused_at_once() -> None:
    """Parsing it would take seconds a cell; JSON of the same length is read."""
    names = ["its"] * 60_000
    assert read_answers(json.dumps(names)) == ("its",)
    with pytest.raises(Unreadable):
        read_answers(str(names))
    assert parse_structure("[" * 500_000 + "]" * 500_000) is None


def test_line_31_half_a_character_cannot_be_smuggled_in_a_text() -> None:
    """No tokenizer encodes it, and the escape within the text hides it from the reader of rows."""
    for text in (json.dumps(["\ud800"]), repr(["\ud800"]), json.dumps({"\udfff": 1})):
        with pytest.raises(Unreadable):
            parse_structure(text)
    assert parse_structure(json.dumps(["\U0001f600"])) == ["\U0001f600"]


@pytest.mark.parametrize(
    "text",
    ["[sic]", "(500) Days of Summer", "{}", "[REC]", "('Heroes')", '"Heroes"', "$9.99", "{x}",
     "Who's [who]", "[A] or [B]", "'Til Death", "nano", "Nan", "none", "an array", "(a, b)"],
)  # fmt: skip
def test_line_31_text_that_looks_like_a_structure_stays_text(text: str) -> None:
    """An answer in brackets is an answer."""
    assert read_answers(text) == parse_targets(text) == parse_targets([text]) == (text,)


@pytest.mark.parametrize(
    "value",
    ["['Jane Austen', 'J. Aus", "['a', b c]", '["a",', "{'b': 'c'}", '{"x": 1}', "[0, 1]",
     "[['a']]", [["a"]], True, 3.5, "['a', 3]", b"a"],
)  # fmt: skip
def test_line_31_what_cannot_be_read_is_refused(value: object) -> None:
    """A damaged, foreign or ambiguous structure is an error."""
    with pytest.raises(Unreadable):
        read_answers(value)
    assert parse_targets(value) == ()


MAIN_AND_ALIASES: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"answer_id": "m.0", "answer": "Jamaica", "aliases": ["JM"]}, ("Jamaica", "JM")),
    ({"answer_text": "Jamaica", "aliases": ["JM"], "aid": "a1"}, ("Jamaica", "JM")),
    ({"name": "New York City", "aliases": ["NYC"]}, ("New York City", "NYC")),
    ({"id": "Q1", "label": "Jamaica", "synonyms": ["JM"]}, ("Jamaica", "JM")),
    ({"AnswerArgument": "m.0", "EntityName": "Jamaica"}, ("Jamaica",)),
    ({"text": None, "answer": "Jamaica", "label": "place"}, ("Jamaica",)),
    ({"text": "Jamaica", "label": "place", "name": "x"}, ("Jamaica",)),
    ({"aliases": ["JM"], "normalized_aliases": ["jm"]}, ("JM", "jm")),
]  # fmt: skip


@pytest.mark.parametrize(("value", "answers"), MAIN_AND_ALIASES)
def test_line_31_an_object_gives_its_own_answer_and_its_aliases(
    value: dict[str, Any], answers: tuple[str, ...]
) -> None:
    """Under the names that published sets use, real or saved as text, alone or in a list."""
    assert read_answers(value) == read_answers([value]) == answers
    assert read_answers(json.dumps([value])) == answers


@pytest.mark.parametrize(
    "value",
    [{"aliases": ["JM"], "title": "Jamaica"}, {"aliases": ["JM"], "names": ["Jamaica"]},
     {"value": "", "aliases": ["JM"], "canonical": "Jamaica"},
     {"AnswerArgument": "2012", "EntityName": None}, {"name": "Q766", "label": "Jamaica"},
     {"label": {"en": "Jamaica"}}, {"aliases": ["JM"], "label": 3}],
)  # fmt: skip
def test_line_31_an_object_whose_own_answer_may_be_lost_is_refused(value: dict[str, Any]) -> None:
    """Its aliases alone would make the right answer wrong."""
    with pytest.raises(Unreadable):
        read_answers(value)


@pytest.mark.parametrize("value", [None, float("nan"), "nan", "NaT", "<NA>", "None", "[]", " ", [],
                                   "[None]", ["nan"], "['']"])  # fmt: skip
def test_line_31_missing_values_are_no_answers(value: object) -> None:
    """What pandas writes for a missing value is not an answer."""
    assert read_answers(value) == ()


def test_line_31_numbers_and_intervals() -> None:
    """Whole numbers are written as digits where a question file is built; an interval is text."""
    assert read_answers(1994.0, numbers=True) == ("1994",)
    assert read_answers(2**70, numbers=True) == (str(2**70),)
    assert read_answers(["[0, 1]"]) == ("[0, 1]",)
    assert [can_be_given(text) for text in ("The The", "{}", "  ", "U.S.", "é")] == [
        False, False, False, True, True]  # fmt: skip


@pytest.mark.parametrize("save", [json.dumps, str])
def test_line_31_messages_saved_as_text_are_messages(save: Any) -> None:
    """A prompt column of messages as text gives messages; a damaged one is refused."""
    messages = [{"role": "user", "content": 'Who\'s "it"?'}]
    assert parse_prompt(save(messages)) == tuple(messages)
    assert parse_prompt(save(messages)[:-3]) == ()
    assert parse_prompt("[{x}] is what?") == "[{x}] is what?"
    assert parse_prompt("nan") == ()
