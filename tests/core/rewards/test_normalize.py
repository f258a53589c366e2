"""The two rules of normalisation, and that every measure of an answer uses the chosen one."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_r1.rewards import REWARDS, RewardInput, RewardScores, build_reward
from search_r1.rewards.f1 import token_f1
from search_r1.rewards.interface import Origin
from search_r1.rewards.normalize import (
    RULES,
    contains_answer,
    covers,
    matches_exactly,
    normalize_answer,
    normalize_unicode,
    rule_of,
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


def em_before(answer: str, accepted: list[str]) -> bool:
    """Return exact match by the published rule alone."""
    return normalize_answer(answer) in {normalize_answer(gold) for gold in accepted} - {""}


def f1_before(answer: str, accepted: list[str]) -> float:
    """Return the published F1, by lists of words."""
    best = 0.0
    for gold in accepted:
        words, left = normalize_answer(answer).split(), normalize_answer(gold).split()
        total, before = len(words) + len(left), len(left)
        for word in words:
            if word in left:
                left.remove(word)
        best = max(best, 2 * (before - len(left)) / total if total else 0.0)
    return best


LATIN = st.text(st.characters(max_codepoint=0x2BFF, exclude_categories=("Cs",)).filter(
    lambda c: not 0x370 <= ord(c) < 0x1D00 and not 0x1F00 <= ord(c) < 0x2000
), max_size=12)  # fmt: skip


@given(LATIN | st.sampled_from(["Paris\u3002", "\u5317\u4eac", "the 1990\u5e74"]), st.lists(LATIN))
def test_answers_in_latin_letters_keep_the_published_figures(
    answer: str, accepted: list[str]
) -> None:
    """EM and F1 are equal digit for digit, whatever the policy answers."""
    assert matches_exactly(answer, accepted) == em_before(answer, accepted)
    assert token_f1(answer, accepted) == f1_before(answer, accepted)


@pytest.mark.parametrize(
    ("answer", "gold", "f1"),
    [
        ("\u300a\u7ea2\u697c\u68a6\u300b", "\u7ea2\u697c\u68a6", 1.0),
        ("\u5317\u4eac\u3002", "\u5317\u4eac", 1.0),
        ("\uff11\uff19\uff19\uff10\u5e74", "1990\u5e74", 1.0),
        ("\u5217\u592b\u00b7\u6258\u5c14\u65af\u6cf0", "\u5217\u592b\u6258\u5c14\u65af\u6cf0", 1.0),
        ("\u0642\u0627\u0647\u0631\u0629\u061f", "\u0642\u0627\u0647\u0631\u0629", 1.0),
        ("\u0926\u093f\u0932\u094d\u0932\u0940\u0964", "\u0926\u093f\u0932\u094d\u0932\u0940", 1.0),
        ("\u00ab\u041c\u043e\u0441\u0441\u00bb", "\u043c\u043e\u0441\u0441", 1.0),
        ("\u9996\u90fd\u5317\u4eac", "\u5317\u4eac\u5e02", 2 * 2 / 7),
        ("\u4e0a\u6d77", "\u5317\u4eac", 0.0),
    ],
)  # fmt: skip
def test_other_scripts_are_compared_by_the_unicode_rule(answer: str, gold: str, f1: float) -> None:
    """By default, too; F1 counts characters of scripts without spaces as words."""
    assert rule_of(gold) is normalize_unicode
    assert matches_exactly(answer, [gold]) == (f1 == 1.0)
    assert token_f1(answer, [gold]) == f1
    assert contains_answer(f"x {answer} y", [gold]) == (f1 == 1.0)


@pytest.mark.parametrize(
    ("answer", "gold", "expected"),
    [
        ("\u662f\u7684", "\u662f", True),
        ("\u4e0d\u662f", "\u662f", False),
        ("No, yes", "yes", False),
    ],
)
def test_yes_and_no_are_not_covered_together(answer: str, gold: str, expected: bool) -> None:
    """In Chinese as in English."""
    assert covers(answer, [gold]) == expected
