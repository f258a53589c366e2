"""The two rules of normalisation, and that every measure of an answer uses the chosen one."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_r1.rewards import REWARDS, RewardInput, RewardScores, build_reward
from search_r1.rewards.interface import Origin
from search_r1.rewards.normalize import (
    RULES,
    contains_answer,
    normalize_answer,
    normalize_unicode,
)

ALIKE = [
    ("cafe\u0301", "caf\u00e9"), ("Bogota\u0301", "Bogot\u00e1"), ("O\u2019Brien", "O'Brien"),
    ("O\u02bcBrien", "O'Brien"), ("Hawai\u02bbi", "Hawai'i"), ("2010\u20132011", "2010-2011"),
    ("2010\u2014 2011", "2010 2011"), ("\u22125", "-5"), ("Par\u200bis", "Paris"),
    ("\ufeffParis", "Paris"), ("Paris\u200f", "Paris"), ("co\u00adoperation", "cooperation"),
    ("\ufb01nal", "final"), ("\uff11\uff12\uff13", "123"), ("CO\u2082", "CO2"),
    ("\u201cParis\u201d", '"Paris"'), ("\u00abParis\u00bb", "Paris"), ("Paris\u2026", "Paris..."),
    ("\uff08\u5317\u4eac\uff09", "\u5317\u4eac"), ("\u5317\u4eac\u3002", "\u5317\u4eac"),
    ("Stra\u00dfe", "STRASSE"), ("\uff34\uff28\uff25 Beatles", "Beatles"),
    ("\u2764\ufe0f", "\u2764"), ("\u30b8\u30e7\u30f3\u30fb\u30ec", "\u30b8\u30e7\u30f3\u30ec"),
    ("e\u200d\u0301t", "\u00e9t"), ("\u01c6", "d\u017e"),
]  # fmt: skip
"""Pairs that the published rule tells apart, although they look alike."""
DIFFERENT = [
    ("caf\u00e9", "cafe"), ("\u20ac5", "$5"), ("\u0430", "a"), ("r\u00e9sum\u00e9", "resume"),
    ("a\u0331 b", "b"), ("10", "1"),
]  # fmt: skip


def scores(name: str, answer: str, gold: str, rule: str) -> dict[str, float]:
    """Return the components of a dialogue whose document is the answer too."""
    turns: list[tuple[Origin, str]] = [
        ("policy", "<think>t</think><search>q</search>"),
        ("observation", f"<information>It is {answer} .</information>"),
        ("policy", f"<think>t</think><answer>{answer}</answer>"),
    ]
    texts = [text for origin, text in turns if origin == "policy"]
    dialogue = RewardInput(texts, turns, [gold], normalize=RULES[rule])
    return dict(build_reward(name, RewardScores())(dialogue).components)


@pytest.mark.parametrize(("first", "second"), ALIKE)
def test_texts_that_look_alike_are_equal_by_the_unicode_rule_only(first: str, second: str) -> None:
    """The published rule keeps them apart, for comparability."""
    assert normalize_unicode(first) == normalize_unicode(second)
    assert normalize_answer(first) != normalize_answer(second)


@pytest.mark.parametrize(("first", "second"), DIFFERENT)
def test_accents_currencies_and_scripts_are_kept_apart(first: str, second: str) -> None:
    """Neither rule takes different words for one."""
    assert normalize_unicode(first) != normalize_unicode(second)


@pytest.mark.parametrize("name", list(REWARDS))
@pytest.mark.parametrize("rule", list(RULES))
def test_every_measure_uses_the_rule(name: str, rule: str) -> None:
    """EM, F1, cover-EM and the answer in a document change together."""
    components = scores(name, "Bogota\u0301 \uff11", "BOGOT\u00c1 1", rule)
    measured = components.keys() & {"em", "f1", "cover_em", "retrieval_hit"}
    assert "em" in measured
    assert {components[measure] for measure in measured} == {float(rule == "unicode")}


@given(st.text())
def test_normalising_twice_changes_nothing(text: str) -> None:
    """The unicode rule is idempotent, and does not depend on the text's own form."""
    once = normalize_unicode(text)
    assert normalize_unicode(once) == once
    for form in ("NFC", "NFD"):
        assert normalize_unicode(unicodedata.normalize(form, text)) == once


@given(st.text(st.characters(max_codepoint=126, min_codepoint=32) | st.sampled_from("\t\n")))
def test_the_rules_agree_on_ascii(text: str) -> None:
    """English figures do not depend on the rule; the long way gives the same as the short one."""
    assert normalize_unicode(text) == normalize_answer(text)
    assert normalize_unicode(text + " \u00e9") == normalize_answer(text + " \u00e9")


def test_a_document_is_searched_by_the_rule() -> None:
    """The answer in a document is compared like the answer itself."""
    document = "Die Stra\u00dfe Par\u00adis"
    assert contains_answer(document, ["STRASSE Paris"], normalize_unicode)
    assert not contains_answer(document, ["STRASSE Paris"])
