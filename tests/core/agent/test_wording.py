"""Formats from YAML files: texts are used byte for byte, and mistakes are reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from search_r1.agent.tags import SEARCH_R1
from verl.agent.interface import Item
from verl.agent.wording import is_file, read_format
from verl.errors import ConfigError
from verl.types import Completion

ORIGINAL = """\
instruction: "Two spaces follow.  Question: {question}\\n"
invalid_action: "\\nA space ends this line. \\n\\tA tab begins this one.\\n"
tags: {tools: {search: ["<search>", "</search>"]}}
item: "Doc {rank}(Title: {title}) {text}"
separator: "\\n"
"""
"""The wire format of the original project's observations: no newline after the last passage."""


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_texts_are_used_byte_for_byte(tmp_path: Path) -> None:
    """Prompt, observation and feedback keep each space, tab and newline of the file."""
    format = read_format(written(tmp_path, ORIGINAL))
    assert format.name == "mine"
    assert format.user_prompt("Who?") == "Two spaces follow.  Question: Who?\n"
    assert format.invalid_action == "\nA space ends this line. \n\tA tab begins this one.\n"
    items = [Item("one", '"A"'), Item("two {text}", '"B"')]
    assert format.observation(items) == (
        '\n\n<information>Doc 1(Title: "A") one\nDoc 2(Title: "B") two {text}</information>\n\n'
    )


def test_tags_of_a_file_replace_the_default_tags(tmp_path: Path) -> None:
    """They end turns and are parsed; the default tags have no effect."""
    text = ORIGINAL.replace('["<search>", "</search>"]', '["<|q|>", "<|/q|>"]')
    format = read_format(written(tmp_path, text))
    assert format.stop == ("<|/q|>", "</answer>")
    (call,) = format.parse(Completion((), (), "<|q|> x <|/q|>", "stop")).calls
    assert (call.tool, call.arguments) == ("search", "x")
    assert not format.parse(Completion((), (), "<search> x </search>", "stop")).calls


def test_a_built_in_format_can_be_written_as_a_file(tmp_path: Path) -> None:
    """A file with the same texts results in an equal format."""
    text = "\n".join(
        [f"instruction: {quoted(SEARCH_R1.instruction)}",
           f"invalid_action: {quoted(SEARCH_R1.invalid_action)}", "name: search_r1",
           'tags: {tools: {search: ["<search>", "</search>"]}}'],
    )  # fmt: skip
    assert read_format(written(tmp_path, text)) == SEARCH_R1


def quoted(text: str) -> str:
    """Return a text in YAML's double quotes."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("instruction:", "instuction:"), r"got instuction.*did you mean instruction\?"),
        (("invalid_action:", "item_:"), "did you mean"),
        (("{question}", ""), r"instruction: .*a text with \{question\}"),
        (('item: "Doc', 'item: 3 #"Doc'), "item: got 3, expected a text"),
        (('["<search>", "</search>"]', '["<search>"]'), "expected two texts"),
        (('["<search>", "</search>"]', '["<q>", "<q>"]'), "got <q> 2 times, expected each once"),
        (('["<search>", "</search>"]', '["<answer>", "</q>"]'), "got <answer> 2 times"),
        (('["<search>", "</search>"]', '["<q>", " "]'), "expected two texts"),
        (("tags:", "tags: [] #"), "tags: got .*expected keys with values"),
        (("instruction", "'"), "expected a YAML file"),
    ],
)
def test_a_file_with_a_mistake_names_it(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    """The message has the invalid key, what was got and expected, and the fix."""
    path = written(tmp_path, ORIGINAL.replace(*change))
    with pytest.raises(ConfigError, match=message) as caught:
        read_format(path)
    assert "mine.yaml" in str(caught.value) and "fix:" in str(caught.value)


def test_a_missing_file_and_a_missing_key_are_reported(tmp_path: Path) -> None:
    """Missing texts have no default."""
    with pytest.raises(ConfigError, match="No such file"):
        read_format(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="no invalid_action"):
        read_format(written(tmp_path, 'instruction: "{question}"'))
    assert is_file("a/b.yaml") and is_file("b.yml") and not is_file("search_r1")
