# ruff: noqa: E501
"""Foreign and damaged files of a run: what a user's folder may contain in place of ours."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import yaml

SOUND = {
    "template": "search_r1", "agent": {"tools": ["search"]},
    "trainer": {"guard": {"patience": 3}, "rollout_data_dir": "rollouts"},
    "reward_model": {"normalize": "squad"}, "actor_rollout_ref": {"model": {"path": "m"}},
}  # fmt: skip
VALUES = (
    1,
    -1,
    1.5,
    True,
    "text",
    "",
    [],
    [1],
    [[]],
    {},
    {"x": 1},
    {1: 2},
    None,
    2**70,
    float("nan"),
)
PATHS = (
    ("template",), ("agent",), ("agent", "tools"), ("trainer",), ("trainer", "guard"),
    ("trainer", "rollout_data_dir"), ("reward_model",), ("actor_rollout_ref",),
    ("actor_rollout_ref", "model"), ("actor_rollout_ref", "model", "path"),
)  # fmt: skip
BOMB = b"a0: &a0 [x, x]\n" + b"".join(
    b"a%d: &a%d [%s]\n" % (n, n, b", ".join([b"*a%d" % (n - 1)] * 9)) for n in range(1, 12)
)
MERGES = b"a0: &a0 {x: 1}\n" + b"".join(
    b"a%d: &a%d {<<: [%s]}\n" % (n, n, b", ".join([b"*a%d" % (n - 1)] * 9)) for n in range(1, 12)
)
TEXTS = (
    b"", b"\n", b"# nothing\n", b"\xef\xbb\xbf", b"\xff\xfe", b"\x00" * 100, b"\x80\x81", b"{", b"[",
    b"a: b: c", b"- a\n- b", b"text", b"12", b"null", b"~", b"a: &a [*a]", b"&a {x: *a}", b"*a",
    b"a: 1\na: 2", b"1: 2", b"null: 1", b"[a]: 1", b"? {a: 1}\n: 2", b"true: 1", b"2026-01-01: 1",
    b"a: 2026-13-45", b"a: 2026-01-01", b"a: !!binary aGk=", b"a: !!set {x, y}", b"a: !!bool maybe",
    b"a: !!int ''", b"a: !!float ''", b"a: !!timestamp x", b"a: !!python/object:os.system x",
    b"a: !mine x", b"a: " + b"9" * 5000, b"a: 0x" + b"f" * 5000, b"a: 1e999", b'a: "\\ud800"',
    b'"\\udfff": 1', b"a: " + b"[" * 5000, b"[" * 60 + b"]" * 60, b"---\na: 1\n---\nb: 2\n", b"%YAML 9",
    b"a:\tb", b"\ta: 1", BOMB, MERGES, b"a: " + b"x" * (1 << 21), b"\n".join([b"- x"] * 200_000),
    "a: ü".encode("utf-16"), "a: ü".encode("latin-1"), b"a: \x07", b"PK\x03\x04", b"\x89PNG\r\n",
    b"a: ${oc.env:HOME}", b"a: ${", b"<html></html>", b'{"a": 1}', b"a: !!str [x]", b"!!omap [a: 1]",
    b"a: 1:2:3", b"a: 1_000", b"a: ''\n\x1a",
)  # fmt: skip


def configs() -> Iterator[bytes]:
    """Yield the content of some 200 files in place of `config.yaml`."""
    yield from TEXTS
    for path, value in itertools.product(PATHS, VALUES):
        content = yaml.safe_load(yaml.safe_dump(SOUND))
        section = content
        for part in path[:-1]:
            section = section[part]
        section[path[-1]] = value
        yield yaml.safe_dump(content).encode()


LINES = (
    b"", b"{", b"{}", b"[]", b"null", b"1", b'"x"', b"\xff", b"\xef\xbb\xbf{}", b"\x00", b"[" * 20_000,
    *(b'{"step": %s, "a": 1}' % value for value in (
        b"null", b"true", b"-1", b"1.5", b'"1"', b"NaN", b"Infinity", b"[]", b"{}", b"1e3",
        b"18446744073709551615", b"9223372036854775808", b"9" * 400, b"1e999")),
    *(b'{"step": 7, "a": %s}' % value for value in (
        b"null", b"true", b"[1]", b'"x"', b"{}", b"NaN", b"9" * 400, b"1e400", b"-0.0")),
    b'{"step": 7, "\\ud800": 1}', b'{"step": 7, "step": 8}', b'{"step": 7} {"step": 8}',
    '{"step": 7}'.encode("utf-16"), b'{"step": 7, "guard/health": "bad"}',
    b'{"step": 7, "guard/health": 1e300, "guard/rollbacks": -1}',
)  # fmt: skip
"""Lines of a `metrics.jsonl`."""
