"""Control tokens of a tokenizer, and how texts from outside are kept from making them.

Every added token that a tokenizer would make of text counts as one: turns, roles, images, begin and
end, padding, unused ones, and whatever has no such name. Unless they are special, some are ordinary
text that a tokenizer's author or a fine-tune has given ids of their own, and are left alone: white
space, plain words and numbers, and the formatting tags of HTML (Gemma has `<b>` and `<table>`).
"""

import functools
import re
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from typing import Any

_PLAIN = re.compile(
    r"[\w\s▁Ġ.,'’-]*|</?(?:a|b|blockquote|br|caption|code|col|colgroup|dd|del|div|dl|dt|em|h[1-6]"
    r"|hr|i|ins|li|mark|ol|p|pre|s|small|span|strong|sub|sup|table|tbody|td|tfoot|th|thead|tr|u|ul)"
    r"\s*/?>",
    re.IGNORECASE,
)
"""Added tokens that are ordinary text, unless they are special."""
MAX_PASSES = 8
"""Passes over a text for tokens that differ in spaces."""
FIRST_NON_ASCII, END_OF_COMPATIBLE = 0x80, 0x2FA20
"""The characters outside this range are their own compatibility form."""
FIRST_OF_ONE_RANGE = "\U00010000"
Trie = dict[str, Any]


class ControlStrings(tuple[str, ...]):
    """Texts of control tokens, longest first, with their patterns, which are built once."""

    @functools.cached_property
    def breaker(self) -> "Breaker":
        return Breaker(self)

    def without(self, texts: Collection[str]) -> "ControlStrings":
        """Return the strings other than `texts`, such as the tags that a format itself writes."""
        kept = ControlStrings(string for string in self if string not in texts)
        return self if len(kept) == len(self) else kept


def control_strings(tokenizer: Any) -> ControlStrings:
    """Return the texts of all control tokens of a tokenizer."""
    found = dict.fromkeys(map(str, tokenizer.all_special_tokens))
    for token in getattr(tokenizer, "added_tokens_decoder", {}).values():
        text = str(token.content)
        if token.special or not _PLAIN.fullmatch(text):
            found[text] = None
            if token.normalized:  # it is compared with normalized text: NFKC, ▁ for a space
                for form in (text, unicodedata.normalize("NFKC", text)):
                    found[form.strip(" ▁")] = None
                    found[form.replace("▁", " ").strip()] = None
    texts = (text for text in found if text.strip())
    return ControlStrings(sorted(texts, key=len, reverse=True))


def break_strings(text: str, strings: Sequence[str]) -> str:
    """Insert a space into each occurrence of `strings` (of two or more characters) in a text.

    A text whose compatibility form (NFKC), which some tokenizers read, contains one of the strings
    is broken up in that form. Takes linear time.
    """
    given = strings if isinstance(strings, ControlStrings) else _cached(tuple(strings))
    return given.breaker(text)


@functools.lru_cache(maxsize=64)
def _cached(strings: tuple[str, ...]) -> ControlStrings:
    return ControlStrings(strings)


class Breaker:
    """Breaks up strings in texts."""

    def __init__(self, strings: Iterable[str]) -> None:
        trie: Trie = {}
        for string in strings:
            if len(string) > 1:
                node = trie
                for character in string:
                    node = node.setdefault(character, {})
                node[""] = {}
        # One pattern for each first character: a constant replacement needs no Python code, and
        # a constant beginning is found the fastest.
        self._steps = [
            (first, re.compile(f"{re.escape(first)}(?={_rest(node)})"), _template(f"{first} "))
            for first, node in trie.items()
        ]
        self._alphabet = frozenset(character for string in strings for character in string)
        # Only a string with a space can arise from a space that was inserted.
        self._num_passes = MAX_PASSES if " " in self._alphabet else 1

    def __call__(self, text: str) -> str:
        text = self._break(text)
        if text.isascii() or not self._steps or not self._foreign.search(text):
            return text
        compatible = unicodedata.normalize("NFKC", text)
        broken = self._break(compatible)
        return text if broken == compatible else broken

    def _break(self, text: str) -> str:
        for _ in range(self._num_passes):
            num_found = 0
            for first, pattern, replacement in self._steps:
                if first in text:
                    text, count = pattern.subn(replacement, text)
                    num_found += count
            if not num_found:
                break
        return text

    @functools.cached_property
    def _foreign(self) -> re.Pattern[str]:
        """A pattern of the characters that can become one of the strings' in NFKC.

        *Example*: `＜` for strings with `<`. Without such a character the form need not be made.
        """
        found = {c for c, form in _compatible_forms().items() if self._alphabet.intersection(form)}
        for character in self._alphabet:  # a composed one can arise from its parts
            found.update(unicodedata.normalize("NFD", character)[1:])
        # Python looks characters up to U+FFFF up in one table, and compares the others one by one.
        listed = re.escape("".join(sorted(c for c in found if c < FIRST_OF_ONE_RANGE)))
        return re.compile(f"[{listed}{FIRST_OF_ONE_RANGE}-\U0010ffff]")


@functools.cache
def _compatible_forms() -> dict[str, str]:
    """Return the compatibility form of each character that has another one."""
    characters = map(chr, range(FIRST_NON_ASCII, END_OF_COMPATIBLE))
    return {c: unicodedata.normalize("NFKC", c) for c in characters if unicodedata.decomposition(c)}


def _template(text: str) -> str:
    return text.replace("\\", r"\\")


def _rest(node: Trie) -> str:
    """Return a pattern of the shortest rests of a trie: a string ends where a shorter one does."""
    chain = ""
    while len(node) == 1 and "" not in node:
        character, node = next(iter(node.items()))
        chain += re.escape(character)
    if "" in node:
        return chain
    return chain + "(?:" + "|".join(re.escape(c) + _rest(child) for c, child in node.items()) + ")"
