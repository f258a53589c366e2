"""Control tokens of a tokenizer, and how texts from outside are kept from making them.

Every added token that a tokenizer would make of text is broken up by a space, except white space
and, unless they are special, plain words and numbers: these are text that a tokenizer's author or a
fine-tune has given ids of their own, and mean what they say.
"""

import functools
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

_PLAIN = re.compile(r"[\w\s▁Ġ.,'’-]*")
"""Added tokens that are ordinary text, unless they are special."""
MAX_PASSES = 8
"""A space can make another token only of a tokenizer with tokens that differ in spaces."""
Trie = dict[str, Any]


def control_strings(tokenizer: Any) -> tuple[str, ...]:
    """Return the texts of all control tokens of a tokenizer, longest first."""
    found = dict.fromkeys(map(str, tokenizer.all_special_tokens))
    for token in getattr(tokenizer, "added_tokens_decoder", {}).values():
        text = str(token.content)
        if token.special or not _PLAIN.fullmatch(text):
            found[text] = None
            if token.normalized:  # it is compared with normalized text
                found[text.strip(" ▁")] = None
    return tuple(sorted((text for text in found if text.strip()), key=len, reverse=True))


def break_strings(text: str, strings: Sequence[str]) -> str:
    """Insert a space into each occurrence of `strings` (of two or more characters) in a text.

    A text whose compatibility form (NFKC), which some tokenizers read, contains one of the strings
    is broken up in that form.
    """
    pattern = _pattern(tuple(strings))
    if pattern is None:
        return text
    text = _break(text, pattern)
    if not text.isascii():
        compatible = unicodedata.normalize("NFKC", text)
        if pattern.search(compatible):
            return _break(compatible, pattern)
    return text


def _break(text: str, pattern: re.Pattern[str]) -> str:
    for _ in range(MAX_PASSES):
        text, count = pattern.subn(r"\g<0> ", text)
        if not count:
            break
    return text


@functools.lru_cache(maxsize=64)
def _pattern(strings: tuple[str, ...]) -> re.Pattern[str] | None:
    """Return a pattern of the first character of each string, if the rest follows."""
    trie: Trie = {}
    for string in strings:
        if len(string) > 1:
            node = trie
            for character in string:
                node = node.setdefault(character, {})
            node[""] = {}
    if not trie:
        return None
    return re.compile("|".join(f"{re.escape(c)}(?={_rest(node)})" for c, node in trie.items()))


def _rest(node: Trie) -> str:
    """Return a pattern of the shortest rests of a trie: a string ends where a shorter one does."""
    chain = ""
    while len(node) == 1 and "" not in node:
        character, node = next(iter(node.items()))
        chain += re.escape(character)
    if "" in node:
        return chain
    return chain + "(?:" + "|".join(re.escape(c) + _rest(child) for c, child in node.items()) + ")"
