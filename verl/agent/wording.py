"""Reads the tags and texts of a tag dialogue from a YAML file, to match a published checkpoint.

    name: mine                       # default: the file's name
    instruction: "Answer. Question: {question}"
    invalid_action: "\\nTry again.\\n"
    tags:                            # opening and closing of each part, with their defaults
      think: ["<think>", "</think>"]
      information: ["<information>", "</information>"]
      answer: ["<answer>", "</answer>"]
      tools: {lookup: ["<lookup>", "</lookup>"]}
      acts_in_think: false
    item: 'Doc {rank}(Title: "{title}") {text}\\n'
    untitled_item: "{text}\\n"
    separator: ""                    # between items
    around: "\\n\\n{information}\\n\\n"

Texts are used byte for byte, including spaces and newlines: quote them in YAML.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from verl.agent.grammar import Grammar, Tag
from verl.agent.tags import TagFormat
from verl.errors import ConfigError, did_you_mean, explain
from verl.yaml_files import read_yaml

SUFFIXES = (".yaml", ".yml")
TEMPLATE_FILE = "template.yaml"
"""Name under which the run's template file is stored with an exported model."""
MAX_CHARS = 2**20
"""Maximum characters of a template file."""
REQUIRED = ("instruction", "invalid_action")


def is_file(template: str) -> bool:
    """Whether a value of the option `template` is a file rather than a built-in format."""
    return template.endswith(SUFFIXES)


def read_format(path: str | Path) -> TagFormat:
    """Read a format from a file. Raises ConfigError, which names the invalid key."""
    try:
        content = read_yaml(path, MAX_CHARS)
    except (OSError, ValueError) as error:
        got = " ".join(str(error).split())
        raise ConfigError(explain(f"template={path}", got, "a YAML file", "correct it")) from error
    where = f"template={path}"
    known = {f.name for f in fields(TagFormat)}
    values = dict(_keys(where, content, known, REQUIRED))
    tags = _grammar(f"{where}, tags", values.pop("tags", {}))
    for key, value in values.items():
        if not isinstance(value, str):
            raise _error(f"{where}, {key}", value, "a text", "quote it")
    for key, needed in (("instruction", "{question}"), ("around", "{information}")):
        if key in values and needed not in values[key]:
            raise _error(f"{where}, {key}", repr(values[key]), f"a text with {needed}", "add it")
    return TagFormat(**{"name": Path(path).stem, **values, "tags": tags})


def _grammar(where: str, content: Any) -> Grammar:
    """Read the tags, each a pair of texts."""
    # A tag dialogue ends its turns at closing tags, so `ends_at_eos` is not a file's to say.
    known = {f.name for f in fields(Grammar)} - {"ends_at_eos"}
    values = dict(_keys(where, content, known))
    tools = _keys(f"{where}, tools", values.pop("tools", {}), None)
    acts_in_think = values.pop("acts_in_think", False)
    if not isinstance(acts_in_think, bool):
        raise _error(f"{where}, acts_in_think", acts_in_think, "true or false", "write one")
    calls = tuple((name, _tag(f"{where}, tools, {name}", pair)) for name, pair in tools.items())
    parts: dict[str, Any] = {n: _tag(f"{where}, {n}", pair) for n, pair in values.items()}
    grammar = Grammar(tools=calls, acts_in_think=acts_in_think, **parts)
    tags = (grammar.think, grammar.information, grammar.answer, *grammar.calls)
    texts = Counter(text for tag in tags for text in (tag.opening, tag.closing))
    text, count = texts.most_common(1)[0]
    if count > 1:
        raise _error(where, f"{text} {count} times", "each once", "use other tags for each part")
    return grammar


def _tag(where: str, pair: Any) -> Tag:
    if (
        not isinstance(pair, list)
        or len(pair) != 2
        or not all(isinstance(text, str) and text.strip() for text in pair)
    ):
        raise _error(where, pair, "two texts, opening and closing", 'as in ["<a>", "</a>"]')
    return Tag(*pair)


def _keys(
    where: str, content: Any, known: Collection[str] | None, required: Collection[str] = ()
) -> Mapping[str, Any]:
    """Return `content` as a mapping; raise ConfigError for unknown or missing keys."""
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise _error(where, content, "keys with values", "see verl/agent/wording.py")
    for key in content:
        if known is not None and key not in known:
            names = ", ".join(sorted(known))
            raise _error(where, key, f"one of {names}", did_you_mean(key, known, "correct it"))
    for key in required:
        if key not in content:
            raise _error(where, f"no {key}", f"a text under {key}", "add it")
    return content


def _error(where: str, got: Any, expected: str, fix: str) -> ConfigError:
    got = got if isinstance(got, str) else repr(got)
    return ConfigError(explain(where, got, expected, fix))
