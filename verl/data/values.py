"""Answers and messages of a row, including lists and objects that were saved as text.

A csv has no lists, and `str(value)` or `json.dumps(value)` of one is text. Such a text is read as
the value that it was written from, or the row is refused; it is never an answer itself
(docs/guides/data.md).
"""

import ast
import io
import itertools
import json
import math
import re
import string
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MAX_STRUCTURE_CHARS = 2**20
"""Longest text that is parsed as a structure; no list of answers or messages is longer."""
MAX_REPR_CHARS = 2**18
"""The same for the `repr` of Python and NumPy, which takes a second to parse."""
MISSING_CELLS = frozenset({"", "nan", "NaN", "NaT", "<NA>", "None", "null", "#N/A", "<unk>"})
"""What pandas, Python, JSON, Excel and TriviaQA write where no value is, in their spelling."""
MISSING_ITEMS = MISSING_CELLS - {"None", "null"}
"""The same for the items of a real list, where published sets have `None` as an answer."""
MAIN_KEYS = (
    "target", "text", "value", "answer", "answer_text", "entity_name", "entityname",
)  # fmt: skip
"""Keys of an object's own answer (Search-R1, SQuAD, TriviaQA, ComplexWebQuestions, QAMPARI, GrailQA
and WebQSP), in lower case."""
NAME_KEYS = ("name", "label")
"""Keys of which one holds it where no other does; beside another they may name anything."""
ALIAS_KEYS = (
    "aliases", "normalized_aliases", "normalizedaliases", "alias", "answer_aliases", "answer_alias",
    "synonyms",
)  # fmt: skip
"""Keys of an object's further accepted answers."""
_WRAPPERS = frozenset({"array", "str_", "int64", "int32", "float64", "float32", "bool_"})
"""Names of NumPy around a value in its `repr`, as in `np.str_('Ada')`."""
_OPENS = re.compile(r"""(?:np\.|numpy\.)?(?:array\(|[\[({])[\s\[({]*["']""")
_LEXEMES = (tokenize.STRING, tokenize.NUMBER, tokenize.NAME, tokenize.OP)


class Unreadable(ValueError):
    """A value that is no answer, with the reason and the fix for the user's message."""

    def __init__(self, expected: str) -> None:
        super().__init__(expected)
        self.expected = expected


def parse_structure(text: str) -> Any:
    """Return the list or object that a text was written from, or None if it is ordinary text.

    JSON, the `repr` of Python and that of NumPy (without commas) are known, and JSON within a JSON
    string. An empty object, `[sic]` and `(500) Days of Summer` are ordinary text. Raises Unreadable
    for a text that begins like a structure with a quote and cannot be parsed.
    """
    text = text.strip()
    if len(text) < 2 or text[0] not in '[{(an"' or text[-1] not in ']})"':
        if text[:1] in "[{" and _OPENS.match(text) and re.search(r"""["']\s*[,:]""", text):
            raise Unreadable("a complete list or object; this one was cut off")
        return None
    if text[0] == '"':
        inner = _load_json(text)
        return parse_structure(inner) if isinstance(inner, str) else None
    if len(text) > MAX_STRUCTURE_CHARS:
        raise Unreadable(f"a list or object of at most {MAX_STRUCTURE_CHARS} characters")
    for load in (_load_json, _load_repr) if len(text) <= MAX_REPR_CHARS else (_load_json,):
        value = load(text)
        if "\\" in text and not _can_be_encoded(value):
            raise Unreadable("text without halves of characters (\\ud800 to \\udfff)")
        if isinstance(value, dict) and value:
            return value
        if isinstance(value, list) and not (text[0] == "(" and not _OPENS.match(text)):
            return value
    if text[0] in "[{" and _OPENS.match(text):
        raise Unreadable("a list or object that can be parsed")
    return None


def is_structure(text: str) -> bool:
    """Whether a text is a list or object saved as text, or a damaged one."""
    try:
        return parse_structure(text) is not None
    except Unreadable:
        return True


def _can_be_encoded(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except (UnicodeEncodeError, RecursionError):
        return False
    return True


def _load_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _load_repr(text: str) -> Any:
    """Parse the `repr` of a list, tuple, set, object or array; None if it is none."""
    try:
        value = ast.literal_eval(_with_commas(text))
    except (ValueError, SyntaxError, RecursionError, MemoryError, tokenize.TokenError):
        return None
    if isinstance(value, set):
        return sorted(value, key=str)
    return list(value) if isinstance(value, tuple) else value


def _with_commas(text: str) -> str:
    """Insert the commas that NumPy leaves out; Python would join adjacent strings to one."""
    parts: list[str] = []
    for token in _bare_tokens(text):
        word = {"nan": "None", "null": "None", "true": "True", "false": "False"}.get(
            token.string, token.string
        )
        begins = token.type == tokenize.STRING or word[0] in "[{"
        if begins and parts and parts[-1][-1] in "\"']}":
            parts.append(",")
        parts.append(word)
    return " ".join(parts)


def _bare_tokens(text: str) -> Iterator[tokenize.TokenInfo]:
    """Yield the tokens of a `repr` without NumPy's names.

    Example: `array(['a'], dtype=object)` is `['a']`.
    """
    lines = io.StringIO(text.replace("\n", " ")).readline
    tokens = (token for token in tokenize.generate_tokens(lines) if token.type in _LEXEMES)
    before = ""
    is_wrapper: list[bool] = []  # of each open bracket
    skips_to = -1  # the number of brackets that remain open after a dtype
    for token, after in itertools.pairwise(itertools.chain(tokens, [None])):
        if token is None:
            return
        word, following = token.string, after.string if after else ""
        opens_wrapper = word == "(" and before in _WRAPPERS
        before = word
        if word in "([{":
            is_wrapper.append(opens_wrapper)
        closes_wrapper = word in ")]}" and bool(is_wrapper) and is_wrapper.pop()
        if len(is_wrapper) == skips_to:
            skips_to = -1
        if opens_wrapper or closes_wrapper or skips_to >= 0:
            continue
        if word == "," and following == "dtype" and is_wrapper and is_wrapper[-1]:
            skips_to = len(is_wrapper) - 1
        elif not ((word in _WRAPPERS and following == "(") or (word in ("np", "numpy", ".")
                  and (following in _WRAPPERS or following == "."))):  # fmt: skip
            yield token


def read_answers(value: Any, *, numbers: bool = False) -> tuple[str, ...]:
    """Return the accepted answers of a cell, each once; () if there is none.

    A list or object, real or saved as text, gives all its answers. With `numbers`, a cell that is
    an integer or integral float (pandas' integers with gaps) is written as digits. Raises
    Unreadable for values with several usual spellings (booleans, dates) and those without text.
    """
    return tuple(dict.fromkeys(_answers(value, MISSING_CELLS, numbers)))


def _answers(value: Any, missing: frozenset[str], numbers: bool) -> Iterator[str]:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return
    if isinstance(value, str):
        structure = parse_structure(value)
        if structure is None:
            if value.strip() not in missing:
                yield value
            return
        if isinstance(structure, list) and _are_numbers(structure):
            raise Unreadable('text; for answers write ["0", "1"], for an interval ["[0, 1]"]')
        value = structure
    if isinstance(value, Mapping):
        yield from _object_answers(value, numbers)
    elif isinstance(value, list | tuple):
        for item in value:
            if isinstance(item, Mapping):  # SQuAD's {"text": …, "answer_start": …}
                yield from _object_answers(item, numbers)
                continue
            if isinstance(item, list | tuple):
                raise Unreadable("a list of texts without further lists")
            is_interval = isinstance(item, str) and "[" in item and _are_numbers(_load_json(item))
            if is_interval:
                yield item
            else:
                yield from _answers(item, MISSING_ITEMS, numbers=False)
    elif numbers and isinstance(value, int) and not isinstance(value, bool):
        yield str(value)
    elif numbers and isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        yield str(int(value))
    else:
        raise Unreadable("an answer, or a list of answers, as text in the form that it is given")


def _are_numbers(value: Any) -> bool:
    is_list = isinstance(value, list) and bool(value)
    return is_list and all(type(item) in (int, float) for item in value)


def can_be_given(answer: str) -> bool:
    """Whether exact match can accept the answer: more than articles and ASCII punctuation."""
    bare = answer.lower().translate(str.maketrans("", "", string.punctuation))
    return bool(set(bare.split()) - {"a", "an", "the"})


def _object_answers(value: Mapping[str, Any], numbers: bool) -> Iterator[str]:
    """Yield the answers of an object. Raises Unreadable if its own one may be under another key."""
    by_key = {str(key).lower(): item for key, item in value.items()}
    others = by_key.keys() - {*MAIN_KEYS, *NAME_KEYS, *ALIAS_KEYS}
    if len(others) == len(by_key):
        raise Unreadable("an object with answer, target, text, or value and aliases")

    def read(keys: Sequence[str], numbers: bool) -> list[str]:
        items = [by_key[key] for key in keys if key in by_key]
        return [answer for item in items for answer in _answers(item, MISSING_CELLS, numbers)]

    own = read(MAIN_KEYS, numbers)
    names = [key for key in NAME_KEYS if by_key.get(key) not in (None, "")]
    if not own and len(names) == 1:
        own = read(names, numbers=False)
    if not own and any(_has_text(by_key[key]) for key in (*others, *names)):
        raise Unreadable("an object whose own answer, beside its aliases, is under the key answer")
    yield from own + read(ALIAS_KEYS, numbers)


def _has_text(value: Any) -> bool:
    """Whether a value of an object, or an item of it, is text that may be an answer."""
    if isinstance(value, list | tuple):
        return any(map(_has_text, value))
    return isinstance(value, str) and value.strip() not in MISSING_CELLS


def parse_messages(text: str) -> Any:
    """Return the messages that a prompt was written from, or the text if it is ordinary text.

    Raises Unreadable for a text that begins like messages and cannot be parsed.
    """
    start = text.lstrip()[:200]
    if not re.match(r"""(?:array\()?[\[({]*\s*\{\s*\\?["'](?:role|content)\\?["']\s*:""", start):
        inner = _load_json(text) if start[:2] in ('"[', '"{') else None
        return parse_messages(inner) if isinstance(inner, str) else text
    structure = parse_structure(text)
    if structure is None:
        raise Unreadable("messages that can be parsed")
    return structure
