"""What a run asks its tools outside of dialogues: whether they answer, and what they serve.

Only the tools that the run depends on are asked. An error in the code of a user's tool is raised as
ToolRefused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from verl.agent.environment import Environment
from verl.agent.interface import Tool
from verl.errors import ToolError, ToolRefused
from verl.plugins import user_file_errors


def unavailable(environment: Environment, seconds: float) -> tuple[Tool, str] | None:
    """Return the first unavailable tool and its problem, or None. Raises ToolRefused."""
    for tool in environment.active:
        with user_file_errors(f"probe of {tool.label}", ToolRefused, "a text"):
            problem = tool.probe(seconds)
        if problem:
            return tool, problem
    return None


def tool_problems(environment: Environment, seconds: float) -> Iterator[ToolError]:
    """Yield the problems of all tools that must be fixed before a run can start."""
    for tool in environment.active:
        with user_file_errors(f"preflight of {tool.label}", ToolRefused, "what is wrong"):
            yield from tool.preflight(seconds)


def fingerprints(environment: Environment) -> dict[str, str]:
    """Return the fingerprints of what all tools serve, by name."""
    found: dict[str, str] = {}
    for tool in environment.active:
        with user_file_errors(f"identity of {tool.label}", ToolRefused, "fingerprints by name"):
            found |= tool.identity()
    return found


def tool_settings(environment: Environment) -> dict[str, Any]:
    """Return the settings of all tools to store with an exported model, also of inactive ones."""
    return {k: value for tool in environment.tools for k, value in tool.settings().items()}
