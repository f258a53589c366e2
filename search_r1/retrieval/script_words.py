"""Words of the analyzer `scripts`: for scripts without spaces, and for those with vowel signs.

Imported only where an index has this analyzer, or where one is chosen for a corpus.
"""

import functools
import logging
import re
import sys
import unicodedata
from collections.abc import Iterator, Sequence

import bm25s

from search_r1.retrieval.corpus import Corpus
from search_r1.unspaced import RANGES, UNSPACED

logger = logging.getLogger(__name__)

SAMPLED = 500
"""Number of passages by which the analyzer for a corpus is chosen."""
SHARE = 0.01
"""Share of passages mainly in other scripts from which on the analyzer for them is chosen."""
_RUN = re.compile(f"[{RANGES}]+")
_OTHER = re.compile(f"[\u0900-\u0dff{RANGES}]")
"""Scripts for which `folded` is not made: those without spaces, and those of India."""
_ASKING = re.compile("请问|为什么|什么|怎么样?|怎样|如何|多少|哪[个里些位]|谁|的|是|[吗呢]$")
"""What asks, and the commonest words without a meaning of their own, in simplified characters."""
_LETTER = re.compile(r"[^\W\d_]")
FIX = "build it again with `search-r1 index --retrieval_method bm25 --analyzer scripts ...`"


def words_of(texts: Sequence[str]) -> list[list[str]]:
    """Return the words of folded texts, those of Latin text exactly as by the analyzer `folded`.

    Of a script without spaces, each character and each pair of neighbours is a word. Signs for
    vowels belong to the words of their letters. Example: ``"1990 北京"`` gives ``1990``, ``北``,
    ``京`` and ``北京``.
    """
    return [[*words, *_of_runs(runs)] for words, runs in _divided(texts)]


def words_of_queries(texts: Sequence[str]) -> list[list[str]]:
    """Return the words of folded queries, some repeated, which weighs them by their number.

    Beside a script without spaces a name in letters would weigh too little: in characters, one for
    about two letters, it would be several words, and it counts as many. What asks in Chinese is
    left out, as English stop words are. Example: ``"Oslo 是什么"`` gives ``oslo`` three times.
    """
    queries = []
    for words, runs in _divided(texts):
        kept = [part for run in runs for part in _ASKING.split(run) if part]
        repeated = (word for word in words for _ in range(len(word) + len(word) % 2 - 1))
        queries.append([*repeated, *_of_runs(kept)] if runs else words)
        if not queries[-1]:  # the question is all there is
            queries[-1] = [*_of_runs(runs)]
    return queries


def _divided(texts: Sequence[str]) -> Iterator[tuple[list[str], list[str]]]:
    """Yield each text's words in scripts with spaces, and its runs in scripts without."""
    spaced: list[list[str]] = bm25s.tokenize(
        [_RUN.sub(" ", text) for text in texts],
        token_pattern=_spaced_pattern(), stopwords="en", return_ids=False, show_progress=False,
    )  # fmt: skip
    return zip(spaced, map(_RUN.findall, texts), strict=True)


def _of_runs(runs: Sequence[str]) -> Iterator[str]:
    return (word for run in runs for word in _characters_and_pairs(run))


@functools.cache
def _spaced_pattern() -> str:
    """Return the pattern of words in scripts with spaces, in which marks belong to words."""
    marks = "".join(
        character for character in map(chr, range(0x300, sys.maxunicode + 1))
        if unicodedata.category(character)[0] == "M" and not UNSPACED.match(character)
    )  # fmt: skip
    return rf"[\w{marks}]{{2,}}"


def _characters_and_pairs(run: str) -> Iterator[str]:
    last = ""
    for unit in run if run.isalpha() else _units(run):
        if unit:
            yield unit
        if last and unit:
            yield last + unit
        last = unit


def _units(run: str) -> Iterator[str]:
    """Yield letters with their marks; "" stands for punctuation, which parts neighbours."""
    unit = ""
    for character in run:
        if unit and unicodedata.category(character)[0] == "M":
            unit += character
            continue
        if unit:
            yield unit
        unit = character if character.isalnum() else ""
        if not unit:
            yield ""
    if unit:
        yield unit


def other_share(corpus: Corpus) -> float:
    """Return the share of passages, evenly spread, that are mainly in scripts of this analyzer."""
    rows = range(0, len(corpus), -(-len(corpus) // SAMPLED))
    return sum(_is_other(document.contents) for document in corpus.documents(rows)) / len(rows)


def _is_other(text: str) -> bool:
    if text.isascii():
        return False
    num_other = len(_OTHER.findall(text))
    return num_other > len(_LETTER.findall(_OTHER.sub("", text)))


def warn_of_corpus(corpus: Corpus, share: float | None = None) -> None:
    """Warn if the corpus has many passages in which an index without this analyzer finds little."""
    share = other_share(corpus) if share is None else share
    if share >= SHARE:
        logger.warning(
            "%.0f %% of the passages of %s are in scripts without spaces or with vowel signs, of "
            "which the index's analyzer makes no words: searches find next to nothing there; %s",
            100 * share, corpus.path, FIX,
        )  # fmt: skip


def warn_of_queries(queries: Sequence[str]) -> bool:
    """Warn of a query that an index without this analyzer cannot read, and say if there is one."""
    unread = next((query for query in queries if UNSPACED.search(query)), None)
    if unread is not None:
        logger.warning(
            "the query %r is in a script without spaces, of which this index's analyzer makes no "
            "words, so that it finds next to nothing (said once); %s", unread[:80], FIX,
        )  # fmt: skip
    return unread is not None
