"""Mistakes in the schema of a tool's arguments are found before a run."""

from typing import Any

import pytest

from verl.agent.interface import Tool, text_arguments
from verl.agent.schema import check_parameters
from verl.errors import ConfigError


def tool(parameters: Any) -> Tool:
    found = Tool()
    found.name, found.parameters = "own", parameters
    return found


TEXT = {"type": "string"}


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"propertie": {"x": TEXT}}, "did you mean properties"),
        ({"properties": {"x": TEXT}, "require": ["x"]}, "did you mean required"),
        ({"properties": {"x": {"tpye": "integer"}}}, "did you mean type"),
        ({"properties": {"x": {"type": "interger"}}}, "did you mean integer"),
        ({"properties": {"x": {"type": ["string", "none"]}}}, "type 'none' of x"),
        ({"properties": {"x": {"anyof": [TEXT]}}}, "did you mean anyOf"),
        ({"properties": {"number": TEXT}, "required": ["numbr"]}, "did you mean number"),
        ({"properties": {"x": "string"}}, "a JSON schema"),
        ({"properties": ["x"]}, "properties as"),
        (["x"], "text_arguments"),
    ],
)
def test_a_word_without_effect_is_refused(parameters: Any, words: str) -> None:
    """An argument would silently be text, or every call invalid."""
    with pytest.raises(ConfigError, match=r"^parameters of tool own: got .*fix: ") as caught:
        check_parameters(tool(parameters))
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "parameters",
    [
        text_arguments(x="meaning"), {}, {"properties": {}}, {"type": "object"},
        {"type": "object", "title": "T", "properties": {"x": {"title": "x", "default": 3}},
         "additionalProperties": False, "minProperties": 1, "$defs": {}, "examples": []},
        {"properties": {"x": {"anyOf": [{"type": "integer"}, {"type": "null"}], "format": "a"}}},
    ],
)  # fmt: skip
def test_other_words_of_json_schema_are_kept(parameters: Any) -> None:
    """Policies may be shown more than is checked here."""
    check_parameters(tool(parameters))
