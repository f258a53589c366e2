"""The rules that normalise answers, and comparisons of normalised answers.

Every measure of an answer (EM, F1, cover-EM, whether a document holds an answer) uses one of these
rules: `squad`, the published one and the default, or `unicode`, in which texts that look alike are
equal. The published rule is made for English: an accepted answer with letters of another script
than the Latin one is always compared by `unicode` (see `rule_of`).
"""

import re
import string
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from search_r1.unspaced import RANGES, UNSPACED

Normalize = Callable[[str], str]
"""A rule that normalises a text, such as `normalize_answer`."""

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower-case the text, then drop ASCII punctuation, articles and extra white space.

    Source: Rajpurkar et al. 2016. Example: ``"The  U.S.A.!"`` gives ``"usa"``, ``"The The"`` gives
    ``""``.
    """
    bare = text.lower().translate(_WITHOUT_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


class _Dropped(dict[int, str | None]):
    """A table for `str.translate` that drops what is not part of a word; filled as it is used."""

    INVISIBLE = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0\u0640")
    """Fillers, joiners and the Arabic elongation, which other categories than Cf contain."""
    APOSTROPHES = frozenset("\u02b9\u02bb\u02bc\u02bd\u02be\u02bf\u02c8\u02ee\ua78b\ua78c")
    """Letters by category that are written as apostrophes (Hawaiʻi)."""

    def __missing__(self, code: int) -> str | None:
        character = chr(code)
        kind = unicodedata.category(character)
        is_selector = 0xFE00 <= code <= 0xFE0F or 0xE0100 <= code <= 0xE01EF or (
            0x180B <= code <= 0x180F
        )  # fmt: skip
        is_dropped = (
            kind[0] == "P"
            or kind in ("Cf", "Sk", "Sm")
            or (kind == "Cc" and not character.isspace())
            or character in string.punctuation
            or character in self.INVISIBLE | self.APOSTROPHES
            or is_selector
        )
        self[code] = None if is_dropped else character
        return self[code]


_DROPPED = _Dropped()
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1b\x7f]")
"""What the table drops of ASCII besides punctuation."""


def normalize_unicode(text: str) -> str:
    """Do as `normalize_answer` for all of Unicode, so that texts that look alike are equal.

    Compatibility forms are composed (NFKC), case is folded, and characters of format, punctuation
    and mathematical symbols of every script are dropped. Accents are kept, since they tell words
    apart, and so are letters of other scripts that look like Latin ones. ASCII texts give the same
    as with `normalize_answer`. Example: ``"L’Ｅ\u0301té\u200b"`` gives ``"lété"``.
    """
    if text.isascii():
        return normalize_answer(_CONTROL.sub("", text))
    # Twice: NFKC turns a spacing accent into a space and a mark, and an ellipsis into full stops.
    composed = unicodedata.normalize("NFC", text)
    folded = unicodedata.normalize("NFKC", composed.translate(_DROPPED)).casefold()
    bare = unicodedata.normalize("NFKC", folded.translate(_DROPPED))
    return " ".join(word for word in bare.split() if word not in ("a", "an", "the"))


RULES: Mapping[str, Normalize] = MappingProxyType(
    {"squad": normalize_answer, "unicode": normalize_unicode}
)
"""Rules by their name in ``reward_model.normalize``."""


_OTHER_SCRIPT = re.compile(
    "[^\x00-\u036f\u1d00-\u1eff\u2000-\u2bff\u2c60-\u2c7f\u2e00-\u2e7f\u3000-\u3004\u3008-\u3020"
    "\u3030\ua700-\ua7ff\uab30-\uab6f\ud800-\uf8ff\ufb00-\ufb06\ufe00-\ufe6f\ufeff-\uff65\uffe0-\uffff"
    "\U0001d000-\U0001ffff\U000e0000-\U0010ffff]"
)
"""A character of another script than the Latin one; not punctuation, a symbol or a Latin form."""


def rule_of(accepted: str, normalize: Normalize = normalize_answer) -> Normalize:
    """Return the rule that compares texts with an accepted answer.

    It is `normalize` for an answer in Latin letters, whatever it is compared with, so that figures
    of English data are those of the published rule. Example: ``北京`` is compared by `unicode`.
    """
    return normalize_unicode if _OTHER_SCRIPT.search(accepted) else normalize


def normalize_accepted(accepted: str, normalize: Normalize = normalize_answer) -> str:
    """Normalise an accepted answer by its own rule."""
    return rule_of(accepted, normalize)(accepted)


def normalized_pairs(
    text: str, accepted: Sequence[str], normalize: Normalize
) -> Iterator[tuple[str, str]]:
    """Yield the text and an accepted answer, both by the answer's rule, for each of the answers."""
    texts: dict[Normalize, str] = {}
    for gold in accepted:
        rule = rule_of(gold, normalize)
        if rule not in texts:
            texts[rule] = rule(text)
        yield texts[rule], rule(gold)


def matches_exactly(
    answer: str, accepted: Sequence[str], normalize: Normalize = normalize_answer
) -> bool:
    """Whether the answer equals an accepted one; an empty normalised answer equals none."""
    return any(text == gold != "" for text, gold in normalized_pairs(answer, accepted, normalize))


MAX_EXTRA_WORDS = 16
"""Maximum words of an answer beyond those of the accepted answer that it contains."""
OPPOSITES: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "yes": ("no",), "no": ("yes",),
    "是": ("不", "否"), "否": ("是",), "对": ("不", "错"), "错": ("对",),
})  # fmt: skip
"""Accepted answers that say nothing without the question, with words that contradict them."""


def covers(answer: str, accepted: Sequence[str], normalize: Normalize = normalize_answer) -> bool:
    """Whether the answer contains an accepted one as whole words, and little else.

    At most `MAX_EXTRA_WORDS` further words are allowed, so that a list of candidates is no answer.
    An answer with both yes and no covers neither.
    """
    return any(
        contains(text, gold)
        and len(words_of(text)) <= len(words_of(gold)) + MAX_EXTRA_WORDS
        and not set(OPPOSITES.get(gold, ())) & set(words_of(text))
        for text, gold in normalized_pairs(answer, accepted, normalize)
    )


def contains_answer(
    text: str, accepted: Sequence[str], normalize: Normalize = normalize_answer
) -> bool:
    """Whether the text contains an accepted answer as whole words, both normalised."""
    return any(contains(found, gold) for found, gold in normalized_pairs(text, accepted, normalize))


def contains(text: str, gold: str) -> bool:
    """Whether a normalised text contains another one, not empty, as whole words.

    In scripts that write words without spaces between them, any place is the end of a word.
    Example: ``"1 234"`` contains ``"1"``, but neither ``"23"`` nor ``""``.
    """
    start = text.find(gold) if gold else -1
    while start >= 0:
        if not _is_inside_word(text, start) and not _is_inside_word(text, start + len(gold)):
            return True
        start = text.find(gold, start + 1)
    return False


_BETWEEN_SPACES = re.compile(rf"[^\W{RANGES}]+")


def words_between_spaces(text: str) -> list[str]:
    """Return the words of a normalised text, but for those in scripts without spaces between words.

    A text that contains another one, as `contains` says, has all of its words.
    """
    return _BETWEEN_SPACES.findall(text)


def _is_inside_word(text: str, position: int) -> bool:
    """Whether the characters before and after a position belong to the same word."""
    sides = text[max(position - 1, 0) : position + 1]
    if len(sides) < 2 or not 0 < position < len(text):
        return False
    return all(_is_of_word(side) and not UNSPACED.match(side) for side in sides)


def _is_of_word(character: str) -> bool:
    return character.isalnum() or unicodedata.category(character)[0] == "M"


def words_of(text: str) -> list[str]:
    """Return the words of a normalised text; a character of a script without spaces is one.

    Example: ``"1990年 paris"`` gives ``["1990", "年", "paris"]``.
    """
    return UNSPACED.sub(r" \g<0> ", text).split()
