"""Checks of the JSON schema in which a tool describes its arguments.

A word that is misspelt would have no effect: an argument without its type would be text, and a
required one that does not exist would make each call invalid.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from verl.agent.environment import TYPES, schema_types
from verl.agent.interface import Tool
from verl.errors import ConfigError, did_you_mean, explain, misspelt

READ = ("type", "properties", "required", "description", "enum", "anyOf", "oneOf")
"""Words of JSON schema that are read here, or that policies are most often shown."""
LIKE_OURS = ("minProperties", "maxProperties", "patternProperties", "additionalProperties",
             "unevaluatedProperties", "dependentRequired", "allOf")  # fmt: skip
"""Other words of JSON schema that look like those."""


def check_parameters(tool: Tool) -> None:
    """Raise ConfigError for the first mistake in a tool's `parameters`."""
    for got, expected, fix in _problems(tool.parameters):
        raise ConfigError(explain(f"parameters of {tool.label}", got, expected, fix))


def _problems(schema: Any) -> Iterator[tuple[str, str, str]]:
    """Yield what was got, what was expected, and the fix, of each mistake."""
    if not isinstance(schema, Mapping):
        yield repr(schema)[:200], "a JSON schema of an object", "use text_arguments(name='meaning')"
        return
    yield from _misspelt(schema, "")
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        yield repr(properties)[:200], "properties as {name: schema}", "correct it"
        return
    for name, part in properties.items():
        if not isinstance(part, Mapping):
            yield f"{name}: {part!r}"[:200], "a JSON schema", f"{name}: {{'type': 'string'}}"
            continue
        yield from _misspelt(part, f"{name}: ")
        for kind in schema_types(part):
            if kind not in TYPES:
                fix = did_you_mean(str(kind), TYPES, "correct it")
                yield f"type {kind!r} of {name}", f"one of {', '.join(TYPES)}", fix
    for name in schema.get("required", ()):
        if name not in properties:
            fix = did_you_mean(str(name), properties, "leave it out of `required`")
            yield f"the required argument {name}", "one of `properties`", fix


def _misspelt(schema: Mapping[str, Any], where: str) -> Iterator[tuple[str, str, str]]:
    for word in schema.keys() - {*READ, *LIKE_OURS}:
        if fix := misspelt(str(word), READ):
            yield f"{where}{word}", "words of JSON schema", fix
