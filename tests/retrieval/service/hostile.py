"""Request bodies that are expensive to parse, in classes; each can have any size."""

from collections.abc import Callable, Iterator
from functools import partial

ITEMS = {
    "ints": b"1", "negatives": b"-1", "nulls": b"null", "bools": b"true", "floats": b"1e5",
    "lists": b"[]", "objects": b"{}", "pairs": b'{"a":1}', "texts": b'"a"', "empty": b'""',
    "nul": b'"\\u0000"', "halves": b'"\\ud800"', "digits": b"9" * 4000, "nan": b"NaN",
    "nested": b"[" * 100 + b"]" * 100, "nested objects": b'{"a":' * 100 + b"1" + b"}" * 100,
    "brackets": b'"' + b"[{" * 500 + b'"', "too long": b'"' + b"a" * 16_385 + b'"',
    "longest": b'"' + b"a" * 16_384 + b'"', "quotes": b'"' + b'\\"' * 200 + b'"',
    "nothing": b"",
}  # fmt: skip
"""Items that a body repeats."""
TEMPLATES = {
    "queries": b'{"queries":[%s]}',
    "after a good one": b'{"queries":["a",%s]}',
    "before half a character": b'{"queries":[%s,"\\ud800"]}',
    "after half a character": b'{"queries":["\\ud800",%s]}',
    "in one query": b'{"queries":[[%s]]}',
    "topk": b'{"queries":["a"],"topk":[%s]}',
    "an unknown field": b'{"queries":["a"],"x":[%s]}',
    "an unknown field, half a character": b'{"queries":["\\ud800"],"x":[%s]}',
    "the deadline": b'{"queries":["a"],"deadline_s":[%s]}',
    "the body": b"[%s]",
    "without an end": b'{"queries":[%s',
    "fields": b'{"x":%s,"queries":["a"]}',
}
"""Bodies in which the items are repeated."""
REPEATED = {
    "lists": (b"", b"[", b""), "objects": (b"", b'{"a":', b""), "spaces": (b"", b" ", b"{}"),
    "one query": (b'{"queries":["', b"a", b'"]}'), "no list": (b'{"queries":"', b"a", b'"}'),
    "escapes": (b'{"queries":["', b"\\u0041", b'"]}'), "bytes": (b"", b"\xff", b""),
    "int": (b'{"queries":["a"],"topk":', b"9", b"}"), "zeros": (b'{"queries":[]}', b"\0", b""),
    "int in a text": (b'{"queries":["a"],"topk":"', b"9", b'"}'),
    "fraction": (b'{"queries":["a"],"deadline_s":0.', b"9", b"}"),
    "exponent": (b'{"queries":["a"],"deadline_s":1e', b"9", b"}"),
    "small exponent": (b'{"queries":["a"],"deadline_s":1e-', b"9", b"}"),
    "float in a text": (b'{"queries":["a"],"deadline_s":"', b"9", b'"}'),
    "bool": (b'{"queries":["a"],"return_scores":"', b"t", b'"}'), "key": (b'{"', b"a", b'":1}'),
    "same keys": (b"{", b'"queries":["a"],', b'"queries":["a"]}'),
    "same bad keys": (b"{", b'"queries":[1],', b'"queries":["a"]}'),
    "texts without end": (b"[" * 250_001, b'"', b""),
    "escaped": (b"[" * 250_001 + b'"', b'\\"', b""),
    "backslashes": (b"[" * 250_001 + b'"', b"\\", b""), "commas": (b'{"queries":[', b",", b"]}"),
    "colons": (b"{", b":", b"}"), "line ends": (b"", b"\n", b""), "text": (b'"', b"a", b'"'),
}  # fmt: skip
"""Start of the body, part that is repeated, end."""
KEYS = {
    "unknown": b"{%s}", "queries": b'{"queries":{%s}}', "half": b'{%s,"queries":["\\ud800"]}',
    "an answer": b'{%s,"queries":["a"]}', "topk": b'{"queries":["a"],"topk":{%s}}',
}  # fmt: skip
NUM_CLASSES = len(ITEMS) * len(TEMPLATES) + len(REPEATED) + len(KEYS) * 3


def classes() -> Iterator[tuple[str, Callable[[int], bytes]]]:
    """Yield the name of each class, and a function that makes a body of about a given size."""
    for what, item in ITEMS.items():
        for where, template in TEMPLATES.items():
            yield f"{what} in {where}", partial(_repeated, template, item)
    for what, parts in REPEATED.items():
        yield f"one of {what}", partial(_long, *parts)
    for what, template in KEYS.items():
        for value in (b"1", b"[]", b'"a"'):
            yield f"keys in {what}, {value!r}", partial(_keyed, template, value)


def _repeated(template: bytes, item: bytes, size: int) -> bytes:
    return template % b",".join([item] * max(1, (size - 80) // (len(item) + 1)))


def _long(start: bytes, middle: bytes, end: bytes, size: int) -> bytes:
    return start + middle * max(1, (size - len(start) - len(end)) // len(middle)) + end


def _keyed(template: bytes, value: bytes, size: int) -> bytes:
    return template % b",".join(b'"%d":%s' % (i, value) for i in range(size // 16))
