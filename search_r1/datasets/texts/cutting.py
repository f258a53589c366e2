"""Cutting of texts into passages of at most so many units, at ends of sentences where possible.

A unit is what `Units` finds: words (`words`), or the tokens of a tokenizer (`tokens`).
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from search_r1.retrieval.errors import SetupError
from search_r1.unspaced import NEVER_SPACED
from verl.errors import explain, first_line

Span = tuple[int, int]
"""Begin and end of a unit, in characters of the text."""
Units = Callable[[str], list[Span]]
"""Finds the units of a text, in order."""

_SENTENCE_START = re.compile(
    r"(?<=[.!?])\s+|\n\s*\n|(?<=[。！？])(?![”’」』）】》])|(?<=[。！？][”’」』）】》])"
)
"""What stands before a sentence: the end of a paragraph ends a sentence too."""
_WORD = re.compile(rf"[{NEVER_SPACED}]{{1,2}}[^\w\s]*|[^\s{NEVER_SPACED}]+")
_UNSPACED = re.compile(f"[{NEVER_SPACED}]")


def words(text: str) -> list[Span]:
    """Return the words of a text, which are separated by white space.

    In scripts without spaces, two characters count as a word, which is about its length in Chinese.
    """
    return [match.span() for match in _WORD.finditer(text)]


def tokens(path: str) -> Units:
    """Return what finds the tokens of a tokenizer, by its folder or hub name. Raises SetupError."""
    try:
        if path.startswith((".", "/", "~")) or Path(path).exists():
            file = Path(path).expanduser()
            file = file / "tokenizer.json" if file.is_dir() else file
        else:
            from transformers.utils.hub import cached_file  # noqa: PLC0415 - slow, by option

            file = Path(str(cached_file(path, "tokenizer.json")))
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise _no_tokenizer(path, error) from error
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # tokenizers raises bare Exception for all errors
        raise _no_tokenizer(path, error) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).offsets)


def _no_tokenizer(path: str, error: Exception) -> SetupError:
    expected = "a tokenizer.json, its folder, or a hub name"
    got = f"{path} ({first_line(error)})"
    return SetupError(explain("--tokenizer", got, expected, "give the encoder's model"))


@dataclass(frozen=True)
class Cutter:
    """Cuts texts into passages."""

    size: int
    """Largest number of units in a passage."""
    overlap: int = 0
    """Most units of the end of a passage that the next one repeats; never more than half of it."""
    units: Units = words

    def __post_init__(self) -> None:
        """Raise SetupError unless passages advance."""
        if not 0 <= self.overlap < self.size:
            expected = f"less than the {self.size} of a whole passage"
            fix = f"--chunk_overlap {self.size // 4}"
            raise SetupError(explain("--chunk_overlap", self.overlap, expected, fix))

    def cut(self, text: str) -> list[str]:
        """Return the passages, with single spaces between words; none of a text without units."""
        parts = _Parts(text, self.units(text))
        passages, start, stop = [], 0, 0
        while stop < len(parts.units):
            stop = parts.latest(stop, start + self.size)
            passages.append(parts.text_between(start, stop))
            start = parts.earliest(max(stop - self.overlap, (start + stop + 1) // 2), stop)
        return [passage for passage in passages if passage]


def choose(
    max_words: int, chunk_size: int | None, tokenizer: str | None, overlap: int = 0
) -> Cutter:
    """Return what cuts by words, or by tokens if `chunk_size` is given. Raises SetupError."""
    if (chunk_size is None) != (tokenizer is None):
        given, missing = ("--chunk_size", "--tokenizer")[:: 1 if tokenizer is None else -1]
        fix = f"give {missing}, or neither and --max_words"
        raise SetupError(explain(missing, f"nothing beside {given}", "both", fix))
    if chunk_size is None or tokenizer is None:
        return Cutter(max_words, overlap)
    return Cutter(chunk_size, overlap, tokens(tokenizer))


@dataclass(frozen=True)
class _Parts:
    """The units of a text, and at which of them words and sentences begin."""

    text: str
    units: list[Span]

    @cached_property
    def _words(self) -> list[int]:
        """Numbers of the units that begin a word."""
        text, end, starts = self.text, -1, []
        for number, (begin, next_end) in enumerate(self.units):
            is_space = text[begin : begin + 1].isspace() and not text[begin - 1].isspace()
            is_unspaced = _UNSPACED.match(text, begin)
            if begin > end or (begin == end and (is_space or is_unspaced)):
                starts.append(number)
            end = next_end
        return starts

    @cached_property
    def _sentences(self) -> list[int]:
        """Numbers of the units that begin a sentence."""
        begins = [begin for begin, _ in self.units]
        found = (
            bisect_left(begins, match.start()) for match in _SENTENCE_START.finditer(self.text)
        )
        return sorted({number for number in found if number < len(begins)})

    def latest(self, after: int, limit: int) -> int:
        """Return the last good place to cut behind unit `after`, at most `limit`."""
        if limit >= len(self.units):
            return len(self.units)
        for starts in (self._sentences, self._words):
            at = bisect_right(starts, limit) - 1
            if at >= 0 and starts[at] > after:
                return starts[at]
        while limit > after + 1 and self.units[limit][0] < self.units[limit - 1][1]:
            limit -= 1  # several tokens of one character
        return limit

    def earliest(self, first: int, stop: int) -> int:
        """Return the first good place to begin in `first` … `stop`."""
        for starts in (self._sentences, self._words):
            at = bisect_left(starts, first)
            if at < len(starts) and starts[at] < stop:
                return starts[at]
        return stop

    def text_between(self, start: int, stop: int) -> str:
        """Return the text of these units, with what no unit covers before and behind them."""
        begin = self.units[start][0] if start else 0
        end = self.units[stop][0] if stop < len(self.units) else len(self.text)
        return " ".join(self.text[begin:end].split())
