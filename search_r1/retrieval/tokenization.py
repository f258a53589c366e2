"""Word tokenization for BM25, identical for corpus and queries."""

import functools
import logging
import re
import unicodedata
from collections.abc import Sequence

import bm25s

logging.getLogger("bm25s").setLevel(logging.INFO)  # bm25s sets its own logger to DEBUG

FOLDED = "folded"
"""Name of today's analyzer in a manifest: forms and accents of letters are folded."""
UNFOLDED = ""
"""Name of the analyzer of indexes that were built before there was another one."""
SCRIPTS = "scripts"
"""`folded`, and words of scripts without spaces, other ones of queries: `script_words`."""
ANALYZERS = (FOLDED, SCRIPTS, UNFOLDED)

_NOT_ASCII = re.compile(r"[^\x00-\x7f]+")
_ACCENTS = (
    range(0x300, 0x370), range(0x1AB0, 0x1B00), range(0x1DC0, 0x1E00), range(0x20D0, 0x2100),
    range(0xFE20, 0xFE30),  # combining marks of Latin, Greek and Cyrillic letters
    range(0x591, 0x5BE), range(0x5C1, 0x5C3), range(0x64B, 0x660), (0x640, 0x670),
)  # fmt: skip
"""Marks that are folded: accents, and the points of Hebrew and Arabic. Those of Indian and other
scripts are vowels."""
_LETTERS = {
    "ø": "o", "ł": "l", "đ": "d", "ð": "d", "þ": "th", "æ": "ae", "œ": "oe", "ħ": "h", "ŧ": "t",
    "ı": "i", "ŋ": "n", "ʻ": "'", "ʼ": "'", "ʹ": "'",
}  # fmt: skip
"""Letters that Unicode does not decompose, and letters that are written as apostrophes."""


class _Folding(dict[int, str | None]):
    """A table for `str.translate`; characters of format (Cf) are dropped, too."""

    def __missing__(self, code: int) -> str | None:
        is_format = unicodedata.category(chr(code)) == "Cf"
        self[code] = None if is_format else chr(code)
        return self[code]


_FOLDING = _Folding({code: None for marks in _ACCENTS for code in marks})
_FOLDING |= {ord(letter): plain for letter, plain in _LETTERS.items()}


def tokenize(
    texts: Sequence[str], analyzer: str = FOLDED, *, of_queries: bool = False
) -> list[list[str]]:
    """Return lower-case words of two or more characters, without English stop words, of texts."""
    if analyzer != UNFOLDED:
        texts = [fold(text) for text in texts]
    if analyzer == SCRIPTS:
        from search_r1.retrieval import script_words  # noqa: PLC0415 - few need it

        return (script_words.words_of_queries if of_queries else script_words.words_of)(texts)
    words: list[list[str]] = bm25s.tokenize(
        list(texts), stopwords="en", return_ids=False, show_progress=False
    )
    return words


def fold(text: str) -> str:
    """Replace each letter beyond ASCII by its plain form, so that spellings of a name are equal.

    Compatibility forms, case and accents are folded: ``"Bogotá ＡＢ ﬁn Straße"`` gives
    ``"Bogota ab fin Strasse"``. Texts in ASCII are returned as they are.
    """
    return text if text.isascii() else _NOT_ASCII.sub(lambda run: _fold_run(run[0]), text)


@functools.lru_cache(1 << 16)
def _fold_run(run: str) -> str:
    """Fold a run of characters beyond ASCII; runs recur, since most are single letters."""
    folded = unicodedata.normalize("NFKD", run).casefold()
    return unicodedata.normalize("NFC", folded.translate(_FOLDING))
