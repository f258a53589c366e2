"""Reads the wording of a question file's prompts, and writes it as a template (YAML).

A checkpoint works best with the prompt that it was trained on. Published checkpoints come with
their training files, whose prompts all have one wording around the question; from them the template
is written on the user's side, so that data, training, `infer` and `evaluate` use that wording.
"""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from search_r1.agent.tags import R1_SEARCHER, SEARCH_R1
from search_r1.datasets.command import TemplateOptions
from search_r1.datasets.question import as_question
from verl.agent.grammar import Grammar, Tag
from verl.agent.tags import TagFormat
from verl.agent.wording import is_file
from verl.data.records import BadRow, short_repr
from verl.data.rows import file_list, parse_prompt, read_records
from verl.errors import ConfigError, DataError, explain
from verl.files import atomic_write

logger = logging.getLogger(__name__)

PLACE = "{question}"
FORMATS = (SEARCH_R1, R1_SEARCHER)
"""Built-in formats whose calls a prompt may explain; their tags and feedback are written, too."""
HEAD = """\
# The wording of the {count} prompts of {file}. Such a file does not have the feedback after a turn
# without an action: invalid_action is ours. If you know what the checkpoint saw, write that.
"""
FIX = "name a file whose prompts all have one wording around the question"


def build(options: TemplateOptions) -> int:
    """Write the template of `--from`. Raises DataError if its prompts have no common wording."""
    if not options.source:
        fix = "--from train.parquet, or --from OWNER/NAME:train for a data set of the hub"
        raise ConfigError(explain("--from", "nothing", "a file with a column prompt", fix))
    if not is_file(str(options.out)):
        expected = "a path that ends with .yaml or .yml"
        raise ConfigError(explain("--out", options.out, expected, "--out template.yaml"))
    instruction, count = common_instruction(options.source)
    known = _known_format(instruction, options.source)
    content = {
        "name": options.out.stem,
        "instruction": instruction,
        "invalid_action": known.invalid_action,
        "tags": _tags(known.tags),
    }
    head = HEAD.format(count=count, file=Path(options.source).name)
    text = yaml.safe_dump(content, allow_unicode=True, sort_keys=False, width=100)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(options.out) as part:
        part.write_text(head + text, encoding="utf-8")
    logger.info("%s: %d prompts have this wording:\n%s", options.out, count, instruction)
    return 0


def common_instruction(source: str) -> tuple[str, int]:
    """Return the wording that all prompts have, and their number. Raises DataError."""
    found: list[str] = []
    count = 0
    for instruction, location in _instructions(source):
        count += 1
        found = found or [instruction]
        if instruction != found[0]:
            got = f"{short_repr(instruction)}, and {short_repr(found[0])} in the first row"
            raise DataError(explain(location, got, "the wording of the first row", FIX))
    return found[0], count


def _instructions(source: str) -> Iterator[tuple[str, str]]:
    """Yield each prompt with its question replaced by a place for one, and the row's location."""
    for file in file_list(source):
        for number, record in read_records(file, ("prompt",)):
            if isinstance(record, BadRow):
                raise DataError(record.problem)
            location = f"{file}, row {number} (counted from 0)"
            yield _instruction(record, location), location


def _instruction(record: Mapping[str, Any], location: str) -> str:
    prompt = parse_prompt(record.get("prompt"))
    messages = () if isinstance(prompt, str) else prompt
    roles = ", ".join(message["role"] for message in messages)
    if roles != "user":
        got = f"roles {roles}" if roles else short_repr(record.get("prompt"))
        raise DataError(explain(f"{location}, prompt", got, "one message of the user", FIX))
    text, question = messages[0]["content"], _question(record)
    if not question:
        fix = "add the questions alone as a column question"
        raise DataError(explain(location, "no question", "a question beside the prompt", fix))
    # Builders end the question with a question mark; the longer text is looked for first.
    for written in (as_question(question), question.strip()):
        before, found, after = text.rpartition(written)
        if found and PLACE not in before + after:
            return f"{before}{PLACE}{after}"
    raise DataError(explain(f"{location}, prompt", short_repr(text), f"{question!r} in it", FIX))


def _question(record: Mapping[str, Any]) -> str:
    extra = record.get("extra_info")
    inner = extra.get("question") if isinstance(extra, Mapping) else None
    return next((q for q in (record.get("question"), inner) if isinstance(q, str) and q), "")


def _known_format(instruction: str, source: str) -> TagFormat:
    """Return the format whose calls the instruction explains. Raises DataError for other calls."""
    for known in FORMATS:
        calls = known.tags.calls
        if all(tag in instruction for call in calls for tag in (call.opening, call.closing)):
            return known
    expected = " or ".join(call.wrap(" … ") for known in FORMATS for call in known.tags.calls)
    fix = "write the template by hand (docs/guides/rewards.md)"
    got = short_repr(instruction)
    raise DataError(explain(f"--from {source}", got, f"a prompt that explains {expected}", fix))


def _tags(grammar: Grammar) -> dict[str, Any]:
    """Return the tags as a template file has them, without those that are as by default."""

    def pair(tag: Tag) -> list[str]:
        return [tag.opening, tag.closing]

    tags: dict[str, Any] = {"tools": {name: pair(tag) for name, tag in grammar.tools}}
    for name in ("think", "information", "answer"):
        if (tag := getattr(grammar, name)) != getattr(Grammar(), name):
            tags[name] = pair(tag)
    return tags | ({"acts_in_think": True} if grammar.acts_in_think else {})
