"""The tools that a chat template writes into prompts, in the manifest of an evaluation.

Templates with tags describe their tools in their own wording, whose hash the manifest has.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from search_r1.agent.search import SearchTool
from search_r1.retrieval.protocol import EmptyRetrieval
from verl.agent import native
from verl.agent.interface import Tool

ENTRY = "tool_schemas"
"""Entry of the manifest, as JSON text: chat templates write keys in their order, which the file of
the manifest sorts. It is left out for the tools of `DEFAULT`."""
DEFAULT = [SearchTool(EmptyRetrieval()).schema]
"""What a chat template shows of the default tools, `[search]`."""


def recorded_schemas(template: str, tools: Sequence[Tool]) -> dict[str, str]:
    """Return the entry for a dialogue format with these tools: nothing if they are the default."""
    schemas = [tool.schema for tool in tools]
    is_default = template != native.NAME or schemas == DEFAULT
    return {} if is_default else {ENTRY: json.dumps(schemas)}


def schemas_of(manifest: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the schemas with which an evaluation's agent was asked; none if by a tag template."""
    if manifest["template"]["name"] != native.NAME:
        return []
    schemas: Sequence[Mapping[str, Any]] = (
        json.loads(manifest[ENTRY]) if ENTRY in manifest else DEFAULT
    )
    return schemas
