"""What plays the dialogues of a run."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.option import option


@dataclass
class AgentConfig:
    """What plays the dialogues of a run."""

    name: str = option("dialogue", resume="experiment", choices=("dialogue",), or_file=True)
    """`dialogue`, or `path/file.py:Name`: called with the options of the run, it gives an agent
    (`verl.agent.interface.Agent`)."""
    tools: list[str] = option(factory=lambda: ["search"], resume="experiment")
    """What the policy may call: names of built-in tools, or `path/file.py:Name` of your own
    (`verl.agent.interface.Tool`; docs/tools.md)."""
